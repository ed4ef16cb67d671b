"""Pages of `kv2` that a chunk's queries see, on sm_90, in Gluon: nearly all of a long prompt's attention.

A flash attention (Dao, arXiv:2307.08691) whose keys and values are dequantised by warps of their own, where
FlashAttention-3 (Shah et al., arXiv:2407.08608) has warps that fetch them: four make float16 of a page's codes in
shared memory (gluon_dequantise.py), eight multiply. While the tensor core is at the values of one page, those eight
are at the weights of the next.

The kernel leaves each row's sums in the coded space of the values, with its maximum and its sum of weights.
`prefill_kernel` of triton_prefill.py goes on from there, with the tokens in 16 bit; it is the one to read first, and
takes the pages by itself where this kernel does not serve.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated", no-warn-unreachable

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from subten.kernels.attention import triton_prefill
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.gluon_dequantise import (
    KEPT,
    PAIRS,
    PRODUCERS,
    STAGES,
    TILE,
    as_float16,
    dequantise,
    lines,
    stage_of,
    token_in,
)
from subten.kernels.attention.inputs import AttentionInputs, coded_until
from subten.kernels.attention.triton_append import WideBatch

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128)
"""That it serves. At 256, sums of 128 rows take all registers."""
WARPS = 8
"""That multiply: a warpgroup for 64 rows, so that both share what is dequantised."""

_ALLOWED = 1e-2
"""Relative difference of two kernels' results: rounding to bfloat16 makes up 1.6e-3, angles of a mean key 1e-3."""
_ROWS = gl.constexpr(16 * WARPS)
_WARPS = gl.constexpr(WARPS)
_REGISTERS, _REGISTERS_WITH_MEAN = gl.constexpr(112), gl.constexpr(120)
"""Of a thread that dequantises, without and with a mean key; the others have 192."""
_LOWEST = gl.constexpr(-1e30)
_NO_LIMIT = gl.constexpr(2**31 - 1)


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[_WARPS.value, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _scores(queries, memory, turn, MEAN_PAIRS: gl.constexpr):
    """Of the turn-th page, on their way."""
    coded, kept, with_mean = queries
    keys, kept_keys, turned, _, _, _, _, _ = memory
    x = gl.zeros([_ROWS, TILE], gl.float32, _product_layout(TILE))
    x = warpgroup_mma(coded, as_float16(keys, turn), x, use_acc=False, is_async=True)
    x = warpgroup_mma(kept, as_float16(kept_keys, turn), x, is_async=True)
    if MEAN_PAIRS:
        x = warpgroup_mma(with_mean, as_float16(turned, turn), x, is_async=True)
    return x


@gluon.jit
def _with_values(weights, memory, turn, output):
    """Sums, and weights times the values of the turn-th page when those are there, on their way."""
    _, _, _, values, _, _, full_values, _ = memory
    place, phase = stage_of(turn)
    mbarrier.wait(full_values.index(place), phase)
    return warpgroup_mma(weights, as_float16(values, turn), output, is_async=True)


@gluon.jit
def _seen(scores, at, seen, coded_end):
    """Scores of a page that begins at a token; those that a row doesn't read through the codes become -inf."""
    S: gl.constexpr = _product_layout(TILE)
    token = (at + token_in(gl.arange(0, TILE, layout=gl.SliceLayout(0, S))))[None, :]
    return gl.where((token >= seen[:, None]) & (token < coded_end[:, None]), scores, float("-inf"))


@gluon.jit
def _weights(scores, row_scale, highest, total, P: gl.constexpr):
    """Take scores into the running softmax (in base 2): weights as an operand, the decay of older ones, maximum and
    sum."""
    new = gl.maximum(highest, gl.max(scores, 1) * row_scale)
    weights = gl.exp2(scores * row_scale[:, None] - new[:, None])
    decay = gl.exp2(highest - new)
    total = total * decay + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(gl.float16), P), decay, new, total


@gluon.jit
def _attend(
    factor,
    sums,
    stats,
    lengths,
    scale,
    bounds,
    first_row,
    end_row,
    seen,
    coded_end,
    first,
    end,
    queries,
    memory,
    SINKS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    MEAN_PAIRS: gl.constexpr,
):
    """Rows from `first_row` on over pages `first` to `end`, as they come into shared memory."""
    _, _, _, _, full_keys, free_keys, _, free_values = memory
    coded_low, seen_high = bounds
    O: gl.constexpr = _product_layout(HEAD_DIM)  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    R: gl.constexpr = gl.SliceLayout(1, _product_layout(TILE))
    row = first_row + gl.arange(0, _ROWS, layout=R)
    row_scale = gl.load(factor + row, mask=row < end_row, other=1.0) * scale
    highest = gl.full([_ROWS], _LOWEST, gl.float32, R)
    total = gl.zeros([_ROWS], gl.float32, R)
    output = gl.zeros([_ROWS, HEAD_DIM], gl.float32, O)

    mbarrier.wait(full_keys.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(_scores(queries, memory, 0, MEAN_PAIRS),))
    mbarrier.arrive(free_keys.index(0), count=1)
    scores = _seen(scores, SINKS + first * TILE, seen, coded_end)
    weights, decay, highest, total = _weights(scores, row_scale, highest, total, P)
    mbarrier.wait(full_keys.index(1), 0, pred=end - first > 1)
    for page in range(first + 1, end):
        turn = page - first
        scores = _scores(queries, memory, turn, MEAN_PAIRS)
        output = _with_values(weights, memory, turn - 1, output)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(free_keys.index(turn % STAGES), count=1)
        at = SINKS + page * TILE
        if (at + TILE > coded_low) | (at < seen_high):
            scores = _seen(scores, at, seen, coded_end)
        later, decay, highest, total = _weights(scores, row_scale, highest, total, P)
        # Waiting for a barrier is a loop, across which the compiler moves nothing: without one here, it leaves the
        # weights for when the tensor core is through.
        place, phase = stage_of(turn + 1)
        mbarrier.wait(full_keys.index(place), phase, pred=page + 1 < end)
        output, weights, later = warpgroup_mma_wait(0, deps=(output, weights, later))
        mbarrier.arrive(free_values.index((turn - 1) % STAGES), count=1)
        output = output * gl.convert_layout(decay, gl.SliceLayout(1, O))[:, None]
        weights = later
    output = warpgroup_mma_wait(0, deps=(_with_values(weights, memory, end - 1 - first, output),))

    gl.store(stats + row, highest, mask=row < end_row)
    gl.store(lengths + row, total, mask=row < end_row)
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, O))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O))
    place = sums + row.to(gl.int64)[:, None] * HEAD_DIM + column[None, :]
    gl.store(place, output, mask=(row < end_row)[:, None])


@gluon.jit(do_not_specialize=["rows", "table_row"])
def coded_kernel(
    queries,
    kept,
    factor,
    sums,
    stats,
    pages,
    block_table,
    query_start,
    context_len,
    mean_pairs,
    starts,
    rotation,
    scale,
    sliding_window,
    rows,
    pages_page,
    pages_head,
    table_row,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    PLACES: gl.constexpr,
    SINKS: gl.constexpr,
    RECENT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    MEAN_PAIRS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """16 rows per warp of one sequence and KV head. Grid: (blocks of rows, num_kv_heads, batch); the last rows, which
    see the most, come first. The arguments are those of `coded_arguments`."""
    head, sequence = gl.program_id(1), gl.program_id(2)
    start = gl.load(query_start + sequence)
    count = gl.load(query_start + sequence + 1) - start
    context = gl.load(context_len + sequence)
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * _ROWS
    end_row = count * GROUP

    # As in `prefill_kernel`: where the codes end that the first, the last and each row read, and where those begin.
    R: gl.constexpr = gl.SliceLayout(1, _product_layout(TILE))
    low = context + first_row // GROUP
    high = context + (gl.minimum(first_row + _ROWS, end_row) - 1) // GROUP
    position = gl.minimum(context + (first_row + gl.arange(0, _ROWS, layout=R)) // GROUP, high)
    limit = _NO_LIMIT
    if CHUNK:
        limit = gl.where(count > 1, gl.maximum(context, SINKS), _NO_LIMIT)
    coded_end = gl.minimum(SINKS + gl.maximum(position + 1 - SINKS - RECENT, 0), limit)
    coded_low = gl.minimum(SINKS + gl.maximum(low + 1 - SINKS - RECENT, 0), limit)
    coded_high = gl.minimum(SINKS + gl.maximum(high + 1 - SINKS - RECENT, 0), limit)
    seen = position * 0
    seen_low, seen_high = 0, 0
    if sliding_window is not None:
        seen = position + 1 - sliding_window
        seen_low, seen_high = gl.maximum(low + 1 - sliding_window, 0), gl.maximum(high + 1 - sliding_window, 0)
    end = gl.cdiv(coded_high - SINKS, TILE)
    first = gl.minimum(gl.maximum(seen_low - SINKS, 0) // TILE, end)

    if (first_row < end_row) & (first < end):
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [_WARPS, 1], [1, 0])
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [_WARPS, 1], [1, 0])
        BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
        own = head.to(gl.int64) * rows + start * GROUP
        part = gl.num_programs(1).to(gl.int64) * rows
        row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))[None, :]
        x = gl.load(queries + (part + own + row) * HEAD_DIM + column, mask=row < end_row, other=0.0)
        coded = gl.allocate_shared_memory(gl.float16, [_ROWS, HEAD_DIM], lines(HEAD_DIM, 16), x)
        keys = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, HEAD_DIM // 2], lines(HEAD_DIM // 2, 32))
        with_mean, turned = coded, keys
        if MEAN_PAIRS:
            column = gl.arange(0, TURNED, layout=gl.SliceLayout(0, WIDE))[None, :]
            pair = column % (TURNED // 2)
            live = pair < MEAN_PAIRS
            channel = gl.load(mean_pairs + head * MEAN_PAIRS + pair, mask=live, other=0)
            channel += column // (TURNED // 2) * (HEAD_DIM // 2)
            place = queries + (2 * part + own + row) * HEAD_DIM + channel
            x = gl.load(place, mask=(row < end_row) & live, other=0.0)
            with_mean = gl.allocate_shared_memory(gl.float16, [_ROWS, TURNED], lines(TURNED, 16), x)
            turned = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, TURNED // 2], lines(TURNED // 2, 32))
        row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, NARROW))[:, None]
        column = gl.arange(0, KEPT, layout=gl.SliceLayout(0, NARROW))[None, :]
        x = gl.load(kept + (own + row) * KEPT + column, mask=row < end_row, other=0.0)
        of_kept = gl.allocate_shared_memory(gl.float16, [_ROWS, KEPT], lines(KEPT, 16), x)
        kept_keys = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, KEPT // 2], lines(KEPT // 2, 32))
        values = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM, PAIRS], lines(PAIRS, 32))
        full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for i in gl.static_range(STAGES):
            mbarrier.init(full_keys.index(i), count=1)
            mbarrier.init(free_keys.index(i), count=1)
            mbarrier.init(full_values.index(i), count=1)
            mbarrier.init(free_values.index(i), count=1)
        fence_async_shared()
        memory = (keys, kept_keys, turned, values, full_keys, free_keys, full_values, free_values)
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        factor + own, sums + own * HEAD_DIM, stats + own, stats + part + own, scale,
                        (coded_low, seen_high), first_row, end_row, seen, coded_end, first, end,
                        (coded, of_kept, with_mean), memory, SINKS, HEAD_DIM, MEAN_PAIRS,
                    ),
                ),
                (
                    dequantise,
                    (
                        pages + head * pages_head, block_table + sequence.to(gl.int64) * table_row, first, end,
                        coded_high, pages_page, mean_pairs + head * MEAN_PAIRS if MEAN_PAIRS else mean_pairs, starts,
                        rotation, memory, PLACES, SINKS, HEAD_DIM, MEAN_PAIRS,
                    ),
                ),
            ],
            [PRODUCERS],
            [_REGISTERS_WITH_MEAN if MEAN_PAIRS else _REGISTERS],
        )  # fmt: skip


def coded_arguments(arguments: dict[str, Any], layer: PagedLayers) -> dict[str, Any]:
    """All arguments of `coded_kernel`, from those of `prefill_kernel` with memory for what it leaves."""
    tables, rotation = layer.tables.gluon, layer.tables.rotation
    assert tables is not None, "there are tables for what the Gluon kernels serve"
    own = {
        "mean_pairs": tables.mean_pairs,
        "starts": tables.starts,
        "rotation": None if rotation is None else rotation.view(torch.int16),
        "MEAN_PAIRS": tables.num_mean_pairs,
        "TURNED": max(16, 2 * triton.next_power_of_2(tables.num_mean_pairs)),
    }
    return {name: own[name] if name in own else arguments[name] for name in coded_kernel.arg_names}


def sees_codes(layer: PagedLayers, inputs: AttentionInputs) -> bool:
    """Whether some query of a step reads a token through the codes: the same in all layers of a format."""
    fmt = layer.layout.format
    key = sees_codes, fmt
    if key not in inputs.kept:
        ends = (coded_until(x.length - 1, x.context_len, x.length, fmt, inputs.rule) for x in inputs.sequences)
        inputs.kept[key] = max(ends, default=0) > fmt.sinks
    return bool(inputs.kept[key])


def attend_prefill(
    q: Tensor,
    wide: WideBatch,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    *,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As `attend_prefill` of triton_prefill.py."""

    def attend_codes(arguments: dict[str, Any], grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        assert arguments["ROWS"] == _ROWS.value, "the grid is that of `prefill_kernel`"
        _, heads, rows, head_dim = arguments["queries"].shape
        sums = torch.empty(heads, rows, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(2, heads, rows, dtype=torch.float32, device=q.device)
        if sees_codes(layer, inputs):  # Else no program sees a page.
            own = coded_arguments(arguments | {"sums": sums, "stats": stats}, layer)
            coded_kernel[grid](**own, num_warps=WARPS)
        return sums, stats

    return triton_prefill.attend_prefill_with(
        attend_codes if q.shape[2] in HEAD_DIMS else None,
        q,
        wide,
        layer,
        inputs,
        scale,
        sliding_window=sliding_window,
        sink_logits=sink_logits,
    )


class CheckedPrefill:
    """`attend_prefill`, which is compared with the Triton kernel where it first reads codes, as a compiler may make
    something else of it on another machine. If they differ, a warning says so, and the Triton kernel goes on."""

    def __init__(self) -> None:
        self._trusted: bool | None = None

    def __call__(
        self, q: Tensor, wide: WideBatch, layer: PagedLayers, inputs: AttentionInputs, scale: float
    ) -> Tensor:
        """See `AttendPrefill`."""
        if self._trusted is False:
            return triton_prefill.attend_prefill(q, wide, layer, inputs, scale)
        found = attend_prefill(q, wide, layer, inputs, scale)
        if self._trusted is None and q.shape[2] in HEAD_DIMS and sees_codes(layer, inputs):
            expected = triton_prefill.attend_prefill(q, wide, layer, inputs, scale)
            length = float(expected.float().norm())
            if not math.isfinite(length):
                return expected
            difference = float((found.float() - expected.float()).norm()) / max(length, 1e-30)
            self._trusted = difference <= _ALLOWED
            if not self._trusted:
                log.warning(
                    "attention of prompts differs by %.1e between the gluon and the triton kernel on this machine; "
                    "the triton one is used",
                    difference,
                )
                return expected
        return found
