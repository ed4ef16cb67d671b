from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import PrefillRule
from subten.kernels.attention.dense import dense_attention_reference
from support.attention import (
    Calibrate,
    Paged,
    attention_by_definition,
    calibrated,
    cut,
    history,
    plain,
    with_calibrations,
)
from support.kv import FORMAT_NAMES, HEAD_DIMS, gaussian

SCALE = 0.11
RULES: tuple[PrefillRule, ...] = ("window", "chunk")
MIXED_NAMES = ("kv4:kv2", "kivi2:kv4", "kv2:kivi2", "fp8:kv2", "int4:article2")

every_format = with_calibrations(*FORMAT_NAMES)
calibrations = st.sampled_from([plain, calibrated])
every_rule = pytest.mark.parametrize("rule", RULES)


def assert_close(result: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    assert result.shape == expected.shape
    assert bool(result.isfinite().all())
    assert float((result - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


# --- against the definition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "group", "rule"),
    [*zip(HEAD_DIMS, (7, 4, 3, 2, 1), (*RULES, *RULES, "window"), strict=True), (64, 5, "chunk")],
)
@with_calibrations(*FORMAT_NAMES, *MIXED_NAMES)
def test_a_ragged_batch_attends_as_defined(
    name: str, calibrate: Calibrate, head_dim: int, group: int, rule: PrefillRule
) -> None:
    layout = PageLayout(get_format(name, sinks=3, recent=10), head_dim)
    lengths = (1, 30, 110)
    chunkings = [[1], cut(30, 16, 1), cut(110, 1, 70, 1, 20)]
    histories = [history(n, 2, group, head_dim, seed=10 * n) for n in lengths]
    paged = Paged(layout, 2, lengths, rule, calibrate=calibrate)
    outputs = paged.run(histories, chunkings, SCALE)
    for past, chunking, out in zip(histories, chunkings, outputs, strict=True):
        expected = attention_by_definition(past, chunking, layout, paged.calibration, rule, SCALE)
        assert_close(out, expected)


@settings(max_examples=50)
@given(data=st.data())
def test_any_batch_attends_as_defined(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*FORMAT_NAMES, *MIXED_NAMES]), "format")
    calibrate = data.draw(calibrations, "calibration")
    sinks = data.draw(st.sampled_from([0, 1, 4, 64, 300]), "sinks")
    recent = data.draw(st.sampled_from([0, 1, 2, 31, 63, 64, 128]), "recent")
    layout = PageLayout(get_format(name, sinks, recent), data.draw(st.sampled_from([16, 64, 80]), "head_dim"))
    kv_heads, group = data.draw(st.integers(1, 2), "kv_heads"), data.draw(st.integers(1, 5), "group")
    rule = data.draw(st.sampled_from(RULES), "rule")
    lengths = data.draw(st.lists(st.integers(1, 257), min_size=1, max_size=3), "lengths")
    sizes = st.lists(st.sampled_from([1, 2, 7, 63, 64, 65, 200]), min_size=1, max_size=4)
    chunkings = [cut(n, *data.draw(sizes, "chunk sizes"), 64) for n in lengths]
    histories = [history(n, kv_heads, group, layout.head_dim, seed=n + row) for row, n in enumerate(lengths)]
    paged = Paged(layout, kv_heads, lengths, rule, calibrate=calibrate)
    outputs = paged.run(histories, chunkings, SCALE)
    for past, chunking, out in zip(histories, chunkings, outputs, strict=True):
        expected = attention_by_definition(past, chunking, layout, paged.calibration, rule, SCALE)
        assert_close(out, expected)


@every_rule
@every_format
def test_contexts_longer_than_a_block_attend_as_defined(name: str, calibrate: Calibrate, rule: PrefillRule) -> None:
    """1220 tokens are three blocks of keys; the last queries come in a chunk and then one by one."""
    layout = PageLayout(get_format(name), 64)
    past = history(1220, 1, 2, 64)
    chunking = [*cut(1200, 256), 12, 1, 1, 6]
    paged = Paged(layout, 1, [past.length], rule, calibrate=calibrate)
    (out,) = paged.run([past], [chunking], SCALE)
    expected = attention_by_definition(past, chunking, layout, paged.calibration, rule, SCALE, 1195)
    assert_close(out[1195:], expected)


@pytest.mark.parametrize("name", ["kv2", "kivi2"])
def test_every_length_from_1_to_257(name: str) -> None:
    """Prefilled in one chunk, each length gives the first rows of the longest, which is checked by definition."""
    layout = PageLayout(get_format(name, sinks=4, recent=32), 64)
    longest = history(257, 1, 2, 64)
    paged = Paged(layout, 1, [257])
    (out,) = paged.run([longest], [[257]], SCALE)
    assert_close(out, attention_by_definition(longest, [257], layout, paged.calibration, "window", SCALE))
    for length in range(1, 257):
        (part,) = Paged(layout, 1, [length]).run([longest.part(0, length)], [[length]], SCALE)
        assert_close(part, out[:length], 1e-12)


# --- what must not change a result ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    name=st.sampled_from([*FORMAT_NAMES, *MIXED_NAMES]),
    sinks=st.sampled_from([0, 4, 64]),
    recent=st.sampled_from([0, 1, 32, 128]),
    length=st.integers(1, 257),
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    calibrate=calibrations,
)
def test_under_the_window_rule_chunks_do_not_matter(
    name: str, sinks: int, recent: int, length: int, sizes: list[int], calibrate: Calibrate
) -> None:
    layout = PageLayout(get_format(name, sinks, recent), 64)
    past = history(length, 1, 2, 64)
    (whole,) = Paged(layout, 1, [length], calibrate=calibrate).run([past], [[length]], SCALE)
    (parts,) = Paged(layout, 1, [length], calibrate=calibrate).run([past], [cut(length, *sizes)], SCALE)
    assert_close(parts, whole, 1e-12)


@every_rule
@every_format
def test_a_batch_of_eight_is_eight_batches_of_one(name: str, calibrate: Calibrate, rule: PrefillRule) -> None:
    layout = PageLayout(get_format(name, sinks=4, recent=16), 64)
    lengths = [1, 2, 64, 65, 100, 129, 200, 257]
    histories = [history(n, 2, 2, 64, seed=10 * n, dtype=torch.float32) for n in lengths]
    chunkings = [cut(n, 90, 1) for n in lengths]
    together = Paged(layout, 2, lengths, rule, calibrate=calibrate).run(histories, chunkings, SCALE)
    for past, chunking, out in zip(histories, chunkings, together, strict=True):
        (alone,) = Paged(layout, 2, [past.length], rule, seed=1, calibrate=calibrate).run([past], [chunking], SCALE)
        assert torch.equal(out, alone)


@every_format
def test_neither_the_order_of_the_pool_nor_what_was_in_it_matters(name: str, calibrate: Calibrate) -> None:
    layout = PageLayout(get_format(name, sinks=4, recent=16), 64)
    lengths = [200, 130]
    histories = [history(n, 2, 2, 64, seed=n, dtype=torch.float32) for n in lengths]
    chunkings = [cut(200, 70, 1), cut(130, 1, 100)]
    first, *others = (
        Paged(layout, 2, lengths, seed=seed, poison=poison, calibrate=calibrate).run(histories, chunkings, SCALE)
        for seed, poison in ((0, 0xFF), (1, 0xFF), (2, 0), (3, 0x7B))
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@every_rule
@every_format
def test_a_sequence_with_nan_leaves_the_others_alone(name: str, calibrate: Calibrate, rule: PrefillRule) -> None:
    layout = PageLayout(get_format(name, sinks=4, recent=16), 64)
    histories = [history(100, 2, 2, 64, seed=seed, dtype=torch.float32) for seed in range(3)]
    chunkings = [cut(100, 70, 1)] * 3
    sound = Paged(layout, 2, [100] * 3, rule, calibrate=calibrate).run(histories, chunkings, SCALE)
    histories[1].k[30] = histories[1].v[30] = torch.nan
    broken = Paged(layout, 2, [100] * 3, rule, calibrate=calibrate).run(histories, chunkings, SCALE)
    assert torch.equal(sound[0], broken[0])
    assert torch.equal(sound[2], broken[2])
    assert bool(broken[1][70:].isnan().all()), "every later query of the broken sequence shows it"


# --- formats that lose nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "group"), [*zip(HEAD_DIMS, (7, 4, 3, 2, 1), strict=True)])
@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("bf16", torch.float32), ("fp32", torch.float32)]
)
def test_in_one_chunk_an_exact_cache_equals_no_cache_bit_for_bit(
    name: str, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    lengths = [1, 63, 64, 65, 130, 600]
    histories = [history(n, 2, group, head_dim, seed=n, dtype=dtype) for n in lengths]
    if name == "fp32":
        histories = [type(past)(past.q, past.k + 1e-5, past.v + 1e-5) for past in histories]
    outputs = Paged(PageLayout(get_format(name), head_dim), 2, lengths).run(histories, [[n] for n in lengths], SCALE)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = (torch.cat([getattr(past, part) for past in histories]) for part in ("q", "k", "v"))
    assert torch.equal(torch.cat(outputs), dense_attention_reference(q, k, v, starts, SCALE))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
@pytest.mark.parametrize("group", [1, 4])
def test_step_by_step_an_exact_cache_equals_no_cache(group: int, length: int) -> None:
    past = history(length, 2, group, 64)
    (out,) = Paged(PageLayout(get_format("bf16"), 64), 2, [length]).run([past], [[1] * length], SCALE)
    starts = torch.tensor([0, length], dtype=torch.int32)
    assert_close(out, dense_attention_reference(past.q, past.k, past.v, starts, SCALE), 1e-13)


# --- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    layout = PageLayout(get_format("kv2", 4, 16), 64)
    past = history(100, 2, 2, 64, dtype=dtype)
    (out,) = Paged(layout, 2, [100]).run([past], [[60, *[1] * 40]], SCALE)
    paged = Paged(layout, 2, [100])
    (exact,) = paged.run([past.to(torch.float64)], [[60, *[1] * 40]], SCALE)
    assert out.dtype == dtype
    # Arithmetic is float32 at least, whatever the query: only the result is rounded to its dtype.
    epsilon = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    assert_close(out.double(), exact, epsilon)


@with_calibrations("bf16", "kv4", "kv2")
def test_float32_errs_at_most_twice_as_much_as_torchs_own_attention(name: str, calibrate: Calibrate) -> None:
    layout = PageLayout(get_format(name, 4, 16), 128)
    length, scale = 256, 128**-0.5
    past = history(length, 2, 4, 128, dtype=torch.float32)
    paged = Paged(layout, 2, [length], calibrate=calibrate)
    (out,) = paged.run([past], [[length - 1, 1]], scale)
    exact = attention_by_definition(past, [length - 1, 1], layout, paged.calibration, "window", scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (past.q, past.k, past.v))
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    torchs64 = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=scale, enable_gqa=True
    )
    own, limit = (float(x.square().mean().sqrt()) for x in (out - exact, torchs - torchs64))
    # With a mean key each score is a sum of two, both rounded; this one is far from the mean of these keys.
    assert own <= (2 if paged.calibration.mean_key is None else 4) * limit


def test_scores_far_beyond_exps_range_do_not_overflow() -> None:
    layout = PageLayout(get_format("kv2", 4, 16), 64)
    past = history(150, 1, 2, 64, dtype=torch.float32)
    loud = type(past)(past.q * 1e4, past.k, past.v)
    (out,) = Paged(layout, 1, [150]).run([loud], [cut(150, 50)], SCALE)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= 1.5 * float(past.v.abs().max())


def test_heads_read_the_key_value_head_of_their_group() -> None:
    """With equal queries, the heads of one group agree and those of different groups do not."""
    layout = PageLayout(get_format("kv2", 4, 16), 64)
    past = history(100, 3, 4, 64)
    same = gaussian(100, 1, 64, seed=7).double().expand(-1, 12, -1)
    (out,) = Paged(layout, 3, [100]).run([type(past)(same, past.k, past.v)], [[100]], SCALE)
    by_group = out.unflatten(1, (3, 4))
    assert torch.equal(by_group, by_group[:, :, :1].expand(-1, -1, 4, -1))
    assert not torch.allclose(by_group[:, 0], by_group[:, 1])
