from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from subten.kernels.attention import triton_heads
from subten.kernels.attention.inputs import QKNorm
from subten.kernels.attention.paged import norm_and_rotate
from subten.kernels.attention.triton_heads import norm_and_rotate_rows
from subten.kernels.rope import RopeSpec, rope_table
from support.compiled import compiled
from support.device_code import quicken_interpreter
from support.kv import CPU, HEAD_DIMS, gaussian

STEPS = {torch.float32: 2.0**-21, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Of the last rounding, twice: it may go the other way, as squares are added up in another order."""


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)


def tokens(count: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys as they lie in one projection, whose other elements are NaN."""
    together = torch.full((count, heads + 2 * kv_heads, head_dim), torch.nan)
    together[:, :heads] = gaussian(count, heads, head_dim, seed=1)
    together[:, heads : heads + kv_heads] = 5 * gaussian(count, kv_heads, head_dim, seed=2)
    q, k, _ = together.to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    return q, k


def norm_of(head_dim: int, dtype: torch.dtype) -> QKNorm:
    weights = (1 + gaussian(2, 1, head_dim, seed=3)[:, 0] / 4).to(dtype)
    return QKNorm(weights[0], weights[1], 1e-6)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("normed", "rotated"), [(True, True), (False, True), (True, False)])
def test_as_the_reference(dtype: torch.dtype, head_dim: int, normed: bool, rotated: bool) -> None:
    q, k = tokens(37, 3, 2, head_dim, dtype)
    positions = torch.randperm(300, generator=torch.Generator().manual_seed(head_dim))[:37]
    norm = norm_of(head_dim, dtype) if normed else None
    rope = rope_table(RopeSpec(head_dim, theta=10_000.0), 300, CPU) if rotated else None
    expected = norm_and_rotate(q, k, positions, norm, rope)
    found = norm_and_rotate_rows(q, k, positions, norm, rope)
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
        # Where two large products nearly cancel, what is left of their roundings is no more than theirs.
        assert float((x.double() - reference.double()).abs().max()) <= STEPS[dtype] * float(reference.abs().max())
        assert float((x == reference).double().mean()) > (0.5 if dtype is torch.float32 else 0.97)


def test_a_row_depends_on_nothing_else() -> None:
    q, k = tokens(20, 2, 1, 64, torch.bfloat16)
    norm, rope = norm_of(64, torch.bfloat16), rope_table(RopeSpec(64, theta=10_000.0), 300, CPU)
    positions = torch.arange(100, 120)
    together = norm_and_rotate_rows(q, k, positions, norm, rope)
    q[3] = torch.nan
    for row in (0, 7, 19):
        part = slice(row, row + 1)
        alone = norm_and_rotate_rows(q[part], k[part], positions[part], norm, rope)
        assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, together, strict=True))
    damaged = norm_and_rotate_rows(q, k, positions, norm, rope)[0]
    assert bool(damaged[3].isnan().all())
    assert torch.equal(damaged[4:], together[0][4:])


def test_nothing_to_do_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_heads, "heads_kernel", None)
    q, k = tokens(3, 2, 1, 64, torch.float16)
    assert norm_and_rotate_rows(q, k, torch.arange(3), None, None) == (q, k)
    rope = rope_table(RopeSpec(64, theta=10_000.0), 8, CPU)
    assert [len(x) for x in norm_and_rotate_rows(q[:0], k[:0], torch.arange(0), None, rope)] == [0, 0]


def test_it_compiles_and_nothing_is_spilled(tmp_path: Path) -> None:
    """For compute capabilities 8.0, 9.0 and 10.0."""
    results = compiled("compile_rows", tmp_path)
    assert {(name, capability) for name, capability, _, _ in results} == {
        (name, capability) for name in ("heads", "norm", "finish") for capability in (80, 90, 100)
    }
    assert [result for result in results if result[3]] == []
    assert all(registers <= 64 for _, _, registers, _ in results)
