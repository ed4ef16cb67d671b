from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs, PrefillRule, WideTokens, triton_prefill
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.triton_append import WideBatch, append_chunk
from subten.kernels.attention.triton_prefill import PreparedQueries, attend_prefill, query_memory
from support.attention import History, Paged, calibrated, history, reads_codes, through_codes
from support.compiled import compiled
from support.device_code import quicken_interpreter
from support.interpreter import correct_numbers
from support.kv import gaussian

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter computes NaN
RULES: tuple[PrefillRule, ...] = ("window", "chunk")
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels get to write to holds NaN."""
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)
    monkeypatch.setattr(torch, "empty_like", poisoned_like)
    monkeypatch.setattr(triton_prefill, "query_memory", poisoned_queries)


def poisoned_like(x: Tensor, **_: object) -> Tensor:
    return torch.full(x.shape, torch.nan if x.is_floating_point() else 255, dtype=x.dtype)


def poisoned_queries(q: Tensor, layer: PagedLayers) -> PreparedQueries:
    memory = query_memory(q, layer)
    for tensor in (memory.rows, memory.kept, memory.factor):
        if tensor is not None:
            tensor.fill_(torch.nan)
    return memory


def in_one_piece(wide: tuple[WideTokens, ...]) -> WideBatch:
    """What the reference returns as `append_chunk` does."""
    tokens = torch.stack([torch.cat([getattr(part, side) for part in wide]) for side in ("keys", "values")])
    return WideBatch(tokens, tuple(part.positions for part in wide))


def appended(paged: Paged, histories: list[History], sizes: list[int]) -> tuple[Tensor, AttentionInputs, WideBatch]:
    """The last `sizes` tokens of each sequence as a chunk, all before them as another."""
    before = {row: past.part(0, past.length - n) for row, (past, n) in enumerate(zip(histories, sizes, strict=True))}
    if any(part.length for part in before.values()):
        paged.append({row: part for row, part in before.items() if part.length})
    chunks = {
        row: past.part(past.length - n, past.length)
        for row, (past, n) in enumerate(zip(histories, sizes, strict=True))
    }
    inputs, wide = paged.append(chunks)
    return torch.cat([chunk.q for chunk in chunks.values()]), inputs, in_one_piece(wide)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(
    name: str, head_dim: int, kv_heads: int, group: int, held: list[int], sizes: list[int], rule: PrefillRule
) -> None:
    """Against the reference, on the bytes that it wrote."""
    layout, seed = PageLayout(get_format(name, sinks=5, recent=12), head_dim), sum(held) + sum(sizes)
    histories = [
        history(before + n, kv_heads, group, head_dim, seed=seed + 3 * row, dtype=torch.float32)
        for row, (before, n) in enumerate(zip(held, sizes, strict=True))
    ]
    paged = Paged(layout, kv_heads, [past.length for past in histories], rule, calibrate=calibrated)
    q, inputs, wide = appended(paged, histories, sizes)
    scale = head_dim**-0.5
    expected = attend_reference(q, wide.by_sequence, paged.cache, inputs, scale)
    found = attend_prefill(q, wide, PagedLayers.of([paged.cache]), inputs, scale)
    for rows in inputs.sequences:
        part = slice(rows.start, rows.end)
        assert relative_error(found[part], expected[part]) <= TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "head_dim", "kv_heads", "group"),
    [
        ("bf16", 64, 2, 4),
        ("bf16", 96, 1, 1),
        ("fp8", 64, 2, 1),
        ("fp8", 80, 1, 7),
        ("kv4", 96, 2, 2),
        ("kv2", 128, 2, 4),
        ("kv2", 80, 1, 3),
        ("kv2", 256, 1, 1),
        ("k4v2", 64, 2, 6),
        ("kv2-plain", 64, 2, 16),
        ("kv2-plain", 128, 1, 5),
    ],
)
def test_a_ragged_batch_reads_what_the_reference_reads(
    name: str, head_dim: int, kv_heads: int, group: int, rule: PrefillRule
) -> None:
    check(name, head_dim, kv_heads, group, [0, 70, 150], [18, 30, 1], rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("held", "size"),
    [(0, 1), (0, 5), (0, 70), (3, 2), (3, 40), (5, 7), (16, 1), (17, 64), (81, 1), (81, 65), (128, 33), (200, 70)],
)
def test_chunks_of_any_size_after_any_history(held: int, size: int, rule: PrefillRule) -> None:
    check("kv2-plain", 64, 1, 2, [held], [size], rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sliding_window", [None, 1, 40, 100])
@pytest.mark.parametrize("name", ["bf16", "kv2-plain"])
def test_sliding_windows_and_sink_logits(name: str, sliding_window: int | None, rule: PrefillRule) -> None:
    layout, group, kv_heads, scale = PageLayout(get_format(name, sinks=5, recent=12), 64), 2, 2, 0.125
    sizes, lengths = [70, 33], [190, 40]
    histories = [history(n, kv_heads, group, 64, seed=n, dtype=torch.float32) for n in lengths]
    paged = Paged(layout, kv_heads, lengths, rule, calibrate=calibrated)
    q, inputs, wide = appended(paged, histories, sizes)
    logits = 2 * gaussian(kv_heads * group, seed=8)
    found = attend_prefill(
        q, wide, PagedLayers.of([paged.cache]), inputs, scale, sliding_window=sliding_window, sink_logits=logits
    )
    for past, size, part in zip(histories, sizes, found.split(sizes), strict=True):
        start = past.length - size
        coded = through_codes(past, layout, paged.calibration)
        reads = [
            [reads_codes(i, j, start, size, layout, rule) for j in range(past.length)]
            for i in range(start, past.length)
        ]
        query, key = torch.arange(start, past.length)[:, None], torch.arange(past.length)
        visible = (key <= query) & (key > query - (sliding_window or past.length))
        through = torch.tensor(reads)
        for head in range(kv_heads * group):
            keys, values = (
                (x[:, head // group].double(), w[:, head // group].double())
                for x, w in zip(coded, (past.k, past.v), strict=True)
            )
            rows = past.q[start:, head].double() * scale
            scores = torch.where(through, rows @ keys[0].T, rows @ keys[1].T).masked_fill(~visible, -torch.inf)
            weights = torch.cat([scores, logits[head].double().expand(size, 1)], dim=1).softmax(1)[:, :-1]
            expected = (weights * through) @ values[0] + (weights * ~through) @ values[1]
            assert relative_error(part[:, head], expected) <= TOLERANCE


def test_scores_far_beyond_exps_range_do_not_overflow() -> None:
    layout = PageLayout(get_format("kv2-plain", 4, 16), 64)
    past = history(150, 1, 2, 64, dtype=torch.float32)
    paged = Paged(layout, 1, [150], calibrate=calibrated)
    q, inputs, wide = appended(paged, [past], [50])
    out = attend_prefill(1e6 * q, wide, PagedLayers.of([paged.cache]), inputs, 0.125)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= 1.5 * float(past.v.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_16_bits_that_lie_in_a_projection(dtype: torch.dtype) -> None:
    layout = PageLayout(get_format("kv2-plain", 4, 16), 64)
    past = history(100, 1, 3, 64, dtype=torch.float32)
    paged = Paged(layout, 1, [100], calibrate=calibrated)
    q, inputs, wide = appended(paged, [past], [40])
    qkv = torch.cat([q, past.k[60:], past.v[60:]], dim=1).to(dtype)
    found = attend_prefill(qkv[:, :3], wide, PagedLayers.of([paged.cache]), inputs, 0.125)
    assert found.dtype == dtype
    expected = attend_reference(qkv[:, :3].float(), wide.by_sequence, paged.cache, inputs, 0.125)
    # The interpreter cuts off what bfloat16 has no room for instead of rounding.
    assert relative_error(found, expected) <= (4e-3 if dtype is torch.bfloat16 else TOLERANCE)


def test_what_append_chunk_hands_over() -> None:
    """The windows that are held, then the new tokens, of each sequence: the same as the reference returns."""
    reference, device = (Paged(PageLayout(get_format("fp8", 3, 6), 64), 2, [31, 7]) for _ in range(2))
    layer = PagedLayers.of([device.cache])
    pasts = [history(n, 2, 1, 64, seed=n, dtype=torch.float32) for n in (30, 6)]
    for part in (slice(0, 4), slice(4, 30)):
        chunks = {row: past.part(part.start, min(part.stop, past.length)) for row, past in enumerate(pasts)}
        inputs = device.inputs({row: chunk.length for row, chunk in chunks.items()})
        k, v = (torch.cat([getattr(chunk, side) for chunk in chunks.values()]) for side in "kv")
        found = append_chunk(k, v, layer, inputs)
        for row, chunk in chunks.items():
            device.held[row] += chunk.length
        expected = in_one_piece(reference.append(chunks)[1])
        assert torch.equal(found.tokens, expected.tokens)
        assert all(torch.equal(*pair) for pair in zip(found.positions, expected.positions, strict=True))


def test_kernels_compile_and_next_to_nothing_is_spilled(tmp_path: Path) -> None:
    """For compute capabilities 8.0, 9.0 and 10.0."""
    results = compiled("compile_prefill", tmp_path, "kv2,128,90", "bf16,64,80", "kv2-plain,80,100")
    assert len(results) == 7
    assert [result for result in results if result[-1] > 128] == []
    assert [spilled for *case, _, spilled in results if case == ["kv2", 128, 90, "prefill plain"]] == [0]
