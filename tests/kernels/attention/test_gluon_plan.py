from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.formats import PageLayout, get_format
from subten.kernels.attention.device_cache import CodingTables
from subten.kernels.attention.gluon_plan import GluonShape, plan_gluon, tune_gluon, why_not_gluon
from subten.kernels.attention.gluon_tables import GluonTables
from subten.kernels.rope import RopeSpec, rope_table
from support.attention import calibrated
from support.kv import CPU

NUM_SMS = 132
KV2 = PageLayout(get_format("kv2"), 128)


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "group", "waves"),
    [(1, 8, 4, 1), (8, 8, 4, 1), (32, 8, 4, 2), (8, 4, 8, 1), (1, 8, 16, 1)],
)
def test_programs_fill_whole_waves(batch: int, num_kv_heads: int, group: int, waves: int) -> None:
    shape = GluonShape.of(KV2, group, mean_pairs=0)
    plan = plan_gluon(shape, batch, num_kv_heads, 512, NUM_SMS)
    places = plan.tuning.programs_per_sm() * NUM_SMS
    programs = batch * num_kv_heads * shape.blocks * plan.splits
    assert (waves - 0.12) * places <= programs <= waves * places


@given(batch=st.integers(1, 256), heads=st.integers(1, 32), pages=st.integers(1, 16384), group=st.integers(1, 16))
def test_every_plan_has_enough_programs_and_none_without_pages(
    batch: int, heads: int, pages: int, group: int
) -> None:
    shape = GluonShape.of(KV2, group, mean_pairs=16)
    plan = plan_gluon(shape, batch, heads, pages, NUM_SMS)
    assert 1 <= plan.splits <= -(-(pages + shape.window_units) // plan.units_per_split)
    assert plan.tuning == tune_gluon(shape, batch * heads * shape.blocks * pages / NUM_SMS)
    assert pages <= plan.splits * 128 * plan.tuning.warps
    assert plan.tuning.registers <= 255
    assert plan.tuning.programs_per_sm() >= 1


@pytest.mark.parametrize(
    ("name", "head_dim", "reason"),
    [
        ("kv2", 128, None),
        ("kv2-plain", 64, None),
        ("kv2", 256, None),
        ("kv2", 96, "serves head_dim 64, 128 and 256, not 96"),
        ("kv4", 128, "serves kv2 and kv2-plain, not the KV format 'kv4'"),
        ("k4v2", 128, "not the KV format 'k4v2'"),
        ("bf16", 128, "not the KV format 'bf16'"),
        ("kivi2", 128, "not the KV format 'kivi2'"),
    ],
)
def test_what_it_does_not_serve_is_said(name: str, head_dim: int, reason: str | None) -> None:
    found = why_not_gluon(PageLayout(get_format(name), head_dim))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_matrices_are_fragments_of_the_tensor_core(head_dim: int) -> None:
    """Element by element, from the definition of an m16n8k16 operand: lane (r, j) holds rows r and r + 8, columns
    2 j and 2 j + 1, and those eight further right."""
    calibration = calibrated(PageLayout(get_format("kv2"), head_dim), 2)
    rope = rope_table(RopeSpec(head_dim, theta=10_000.0), 300, CPU)
    mean = torch.zeros(1, 2, head_dim)
    pairs = torch.tensor([[3, 5, 8, 9, 11, 20, 21, 22, 25, 30], [0, 1, 2, 7, 14, 15, 16, 17, 18, 19]])
    mean[0].scatter_(1, pairs, 1.0).scatter_(1, pairs + head_dim // 2, 2.0)
    tables = GluonTables.of([calibration.coding], mean, rope, sinks=7)
    assert tables.output_matrix is not None
    assert tables.output_scale is not None
    assert tables.mean_pairs is not None
    assert tables.mean is not None
    assert tables.within is not None
    matrix = tables.output_matrix[0, 1].view(head_dim // 16, head_dim // 16, 8, 4, 8).float()
    exact = calibration.coding.value.from_coded[1].T / tables.output_scale[0, 1]
    for step, tile, r, j, index in torch.randint(0, 4, (50, 5)).tolist():
        low, half, right = index % 2, index // 2 % 2, index // 4
        element = exact[16 * tile + 8 * half + r, 16 * step + 8 * right + 2 * j + low]
        assert abs(float(matrix[step, tile, r, j, index] - element)) <= 1e-3
    assert tables.num_mean_pairs == 16
    assert torch.equal(tables.mean_pairs[0, :, :10], pairs.int())
    assert torch.equal(tables.mean[0, :, :, :10], torch.tensor([1.0, 2.0])[:, None].expand(2, 2, 10))
    assert not tables.mean[..., 10:].any()
    within = tables.within[0, 1].view(2, 4, 8, 4, 8).float()
    for eight, tile, r, j, index in torch.randint(0, 2, (50, 5)).tolist():
        low, half, sideways = index % 2, index // 2 % 2, index // 4
        slot, pair = 16 * tile + 8 * half + r, tables.mean_pairs[0, 1, 8 * eight + 2 * j + low]
        angle = (rope.sin if sideways else rope.cos)[slot % 8 * 8 + slot // 8, pair]
        assert abs(float(within[eight, tile, r, j, index] - angle)) <= 1e-3
    assert tables.starts is not None
    assert torch.equal(tables.starts[2], torch.stack([rope.cos[7 + 128], rope.sin[7 + 128]], dim=-1))


def test_tables_are_made_for_what_the_kernel_serves() -> None:
    kv2, kv4 = (calibrated(PageLayout(get_format(name), 64), 1) for name in ("kv2", "kv4"))
    assert CodingTables.of(PageLayout(get_format("kv2"), 64), [kv2.coding], [kv2.mean_key]).gluon is not None
    assert CodingTables.of(PageLayout(get_format("kv4"), 64), [kv4.coding], [kv4.mean_key]).gluon is None
