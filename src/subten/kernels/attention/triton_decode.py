"""Attention of decoding, one new token per sequence: Triton, for NVIDIA GPUs from sm_80 on.

One launch per layer, behind `append_decode`, which leaves the queries in the keys' coded space. A program is one
split of one sequence and KV head: some of its pages, or some of its 16-bit windows. It leaves partial results in
scratch memory, and the last program to arrive (there is a counter per sequence and head) adds them up in the order of
the splits, takes the part that came from codes out of the values' coded space, and stores the output. Results do not
depend on who was last, and nothing waits for another launch.

Within a program every warp works on tokens of its own: tensors have a leading axis of warps (`lanes`), and what these
found is merged at the end. Tokens lie along the rows of the tensor core's tiles and query heads along the columns,
since a tile has eight columns at least and a group of heads often no more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.formats.spec import PAGE_SIZE
from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import AttentionInputs
from subten.kernels.attention.plan import FEW_SPLITS, WINDOW_SPLIT, DecodePlan, DecodeShape, plan_decode
from subten.kernels.attention.triton_append import DecodeQuery
from subten.kernels.attention.triton_operands import (
    OFFSET_STEP,
    bf16_operand,
    common_factor,
    factor,
    headroom,
    high_f16,
    load_grid,
    load_words,
    low_f16,
    operand,
    wide_product,
)

_PAGE_SIZE, _WINDOW_SPLIT = tl.constexpr(PAGE_SIZE), tl.constexpr(WINDOW_SPLIT)
_FEW_SPLITS = tl.constexpr(FEW_SPLITS)
_SIDE = tl.constexpr(math.isqrt(PAGE_SIZE))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(math.log2(math.e))

_LOWEST = tl.constexpr(-1e20)
"""Start of a running maximum: finite, so that a warp which has seen no key yet does not become NaN, also after it was
multiplied by the unit of the scores; far below any score."""

_QUERY_MAX, _QUERY_MIN = tl.constexpr(2.0**7), tl.constexpr(2.0**-30)
"""About the largest element of a query as an operand: far from overflow, and elements 2^13 times smaller are still
normal fp16 numbers after the factor of a code (2^-8 at least). A query without an element above the other number
makes scores of next to nothing, whatever becomes of it as an operand."""

_PARTS_AT_ONCE = tl.constexpr(32)
"""Splits whose maxima and sums are merged at a time."""
_CHANNELS_AT_ONCE = tl.constexpr(32)
"""Channels that are added up and taken out of coded space at a time."""
_SUMS_PER_WARP = tl.constexpr(256)
"""Sums per warp and head that are in flight while splits are added up."""

_BYTES_PER_UNIT = 16
_WORDS_PER_UNIT = tl.constexpr(_BYTES_PER_UNIT // 2)
"""Strides are passed in these units: the compiler then knows that rows are aligned and loads 16 bytes at once."""


@dataclass(frozen=True)
class DecodeScratch:
    """Memory through which the programs of a launch pass results on; one serves all layers in turn, on one stream.

    Attributes:
        stats: float32 [batch, num_kv_heads, splits, 2, group], largest score (times log2 e) and sum of weights.
        sums: float32 [batch, num_kv_heads, splits, group, head_dim], weighted sums of values.
        arrived: int32 [batch, num_kv_heads], programs that have left their results; zero between launches.
    """

    stats: Tensor
    sums: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, query: DecodeQuery, layer: PagedLayers, plan: DecodePlan) -> DecodeScratch:
        """For such queries over `layer`, and over all layers of its format and shape."""
        (batch, num_heads, head_dim), num_kv_heads = query.q.shape, layer.pages.shape[2]
        group = num_heads // num_kv_heads
        splits = DecodeShape.of(layer.layout, group).window_splits + plan.page_splits
        return cls(
            query.q.new_empty(batch, num_kv_heads, splits, 2, group, dtype=torch.float32),
            query.q.new_empty(batch, num_kv_heads, splits, group, head_dim, dtype=torch.float32),
            query.q.new_zeros(batch, num_kv_heads, dtype=torch.int32),
        )


def attend_decode(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: DecodePlan | None = None,
    scratch: DecodeScratch | None = None,
    *,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over one layer's cache.

    The host reads nothing back, so that a CUDA graph can capture the call. Operands of the tensor cores are fp16,
    sums float32: an element of a key or value in 16 bit that is larger than a fp16 (65504) becomes infinite.

    Args:
        query: what `append_decode` returned for this step; head h reads KV head h // (num_heads / num_kv_heads).
        layer: one layer, this step's tokens appended.
        inputs: the batch; the new token of each sequence is at position `context_len`. Nothing is read for sequences
            with a negative `window_slot` (which fill up a batch), and their output is zero.
        scale: factor of q . k, above 0.
        plan: how the launch is split. By default, for sequences as long as the block table is wide.
        scratch: for this plan and these shapes. By default allocated, which is one more launch.
        sliding_window: tokens that a query sees, itself included; None means all.
        sink_logits: float32 [num_heads], the score of a key without a value that each head sees besides (learned
            attention sinks, as in gpt-oss); `scale` does not apply to it.

    Returns:
        [batch, num_heads, head_dim] in q's dtype.
    """
    num_kv_heads = layer.pages.shape[2]
    shape = DecodeShape.of(layer.layout, query.q.shape[1] // num_kv_heads, sliding_window)
    plan = plan or _default_plan(query, layer, inputs.block_table.shape[1], shape)
    scratch = scratch or DecodeScratch.allocate(query, layer, plan)
    out = torch.empty_like(query.q, memory_format=torch.contiguous_format)
    arguments = decode_arguments(query, layer, inputs, scale, plan, scratch, shape, sink_logits, out)
    tuning = plan.tuning
    decode_kernel[(shape.window_splits + plan.page_splits, num_kv_heads, len(query.q))](
        **arguments, num_warps=tuning.warps, num_stages=1, maxnreg=tuning.max_registers
    )
    return out


def prepare_decode(
    query: DecodeQuery, layer: PagedLayers, max_pages: int, *, sliding_window: int | None = None
) -> tuple[DecodePlan, DecodeScratch]:
    """Plan and scratch of `attend_decode`, for all steps and layers of these shapes and sequences of `max_pages`."""
    shape = DecodeShape.of(layer.layout, query.q.shape[1] // layer.pages.shape[2], sliding_window)
    plan = _default_plan(query, layer, max_pages, shape)
    return plan, DecodeScratch.allocate(query, layer, plan)


def _default_plan(query: DecodeQuery, layer: PagedLayers, max_pages: int, shape: DecodeShape) -> DecodePlan:
    removed_mean = layer.tables.mean is not None
    num_sms = _multiprocessors(query.q.device)
    return plan_decode(shape, removed_mean, len(query.q), layer.pages.shape[2], max_pages, num_sms)


DECODE = DecodeKernel(attend_decode, prepare_decode)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode_arguments(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: DecodePlan,
    scratch: DecodeScratch,
    shape: DecodeShape,
    sink_logits: Tensor | None,
    out: Tensor,
) -> dict[str, Any]:
    """All arguments of `decode_kernel`.

    Args:
        query: see `attend_decode`.
        layer: likewise.
        inputs: likewise.
        scale: likewise.
        plan: likewise.
        scratch: likewise.
        shape: of the layer.
        sink_logits: see `attend_decode`.
        out: where to leave the result.
    """
    tables = layer.tables
    pages, windows = layer.pages[0], layer.windows[0]
    q = query.q.contiguous()
    page_stride, record_stride = (stride // _BYTES_PER_UNIT for stride in pages.stride()[:2])
    window_strides = (stride * windows.itemsize // _BYTES_PER_UNIT for stride in windows.stride()[:3])
    return {
        "q": q,
        "coded_q": q if query.coded is None else query.coded,
        "kept_q": query.kept if shape.num_kept else None,
        "pages": pages.view(torch.int16),
        "windows": windows.view(torch.int16),
        "context_len": inputs.context_len,
        "block_table": inputs.block_table,
        "window_slot": inputs.window_slot,
        "mean": tables.mean,
        "rope_cos": tables.rope and tables.rope.cos,
        "rope_sin": tables.rope and tables.rope.sin,
        "rotation": tables.rotation,
        "output_matrix": tables.output_matrix,
        "sink_logits": sink_logits,
        "stats": scratch.stats,
        "sums": scratch.sums,
        "arrived": scratch.arrived,
        "out": out,
        "scale": scale * _LOG2_E.value,
        "page_stride": page_stride,
        "record_stride": record_stride,
        **dict(zip(("window_stride", "values_stride", "window_head_stride"), window_strides, strict=True)),
        "table_stride": inputs.block_table.stride(0),
        "pages_per_split": plan.pages_per_split,
        "SHAPE": shape,
        "TUNING": plan.tuning,
    }


# --- queries, softmax ----------------------------------------------------------------------------------------


@triton.jit
def _load_query(q, channel, inside, head, SHAPE: tl.constexpr):
    """[channels, heads] of one KV head, float32; zero where a channel is not `inside` or a head not in the group."""
    mask = inside[:, None] & (head[None, :] < SHAPE.group)
    return tl.load(q + head[None, :] * SHAPE.head_dim + channel[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normaliser(largest):
    """The power of two that brings what is `largest` at most up or down to `_QUERY_MAX`, or twice that."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return _QUERY_MAX / tl.maximum(power, _QUERY_MIN)


@triton.jit
def _per_warp(x, TUNING: tl.constexpr):
    return tl.broadcast_to(x[None], [TUNING.warps, x.shape[0], x.shape[1]])


@triton.jit
def _softmax_step(scores, unit, visible, highest, total, HEADROOM: tl.constexpr):
    """Take a tile of scores [lanes, tokens, heads] in: its weights, the decay of older sums, and new maximum and sum.

    Scores and maximum count in `unit` [heads]: to apply it costs nothing in a multiply-add. Weights are 2^HEADROOM
    at most.
    """
    scores = tl.where(visible[:, :, None], scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    decay = tl.exp2((highest - raised) * unit[None, :])
    weights = tl.exp2(scores * unit[None, None, :] - (raised * unit[None, :] - HEADROOM)[:, None, :])
    return weights, decay, raised, total * decay + tl.sum(weights, 1)


@triton.jit
def _side_by_side(x, SHAPE: tl.constexpr, TUNING: tl.constexpr):
    """[lanes, pairs, heads] as a fp16 operand [pairs, lanes * heads]."""
    return tl.reshape(tl.permute(x.to(tl.float16), (1, 0, 2)), [SHAPE.channels // 2, TUNING.warps * SHAPE.heads])


@triton.jit
def _visible(number, first_token, end_token, SHAPE: tl.constexpr):
    visible = number < end_token
    if SHAPE.sliding_window is not None:
        visible &= number >= first_token
    return visible


@triton.jit
def _read_anew(register: tl.constexpr):
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %" + register + ";", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _program_id(AXIS: tl.constexpr):
    """Read anew, as is `_num_programs`: the loop over pages has no register to spare for what is needed behind it."""
    if _INTERPRETED:
        return tl.program_id(AXIS)
    else:
        return _read_anew("ctaid." + "xyz"[AXIS])


@triton.jit
def _num_programs(AXIS: tl.constexpr):
    if _INTERPRETED:
        return tl.num_programs(AXIS)
    else:
        return _read_anew("nctaid." + "xyz"[AXIS])


@triton.jit
def _this_pair():
    """Number of this program's sequence and KV head."""
    return _program_id(2) * _num_programs(1) + _program_id(1)


@triton.jit
def _this_part():
    """Number of this program's split, among the splits of all."""
    return _this_pair().to(tl.int64) * _num_programs(0) + _program_id(0)


@triton.jit
def _store_stats(stats, part, highest, total, unit, head, SHAPE: tl.constexpr, HEADROOM: tl.constexpr):
    """Merge the warps' maxima and sums and store them; returns what each warp's sums count for [lanes, heads]."""
    merged = tl.max(highest, 0)
    share = tl.exp2((highest - merged[None, :]) * unit[None, :])
    pointer = stats + part * (2 * SHAPE.group) + head
    tl.store(pointer, merged * unit - HEADROOM, mask=head < SHAPE.group)
    tl.store(pointer + SHAPE.group, tl.sum(total * share, 0), mask=head < SHAPE.group)
    return share


@triton.jit
def _store_sums(sums, part, result, channel, inside, head, SHAPE: tl.constexpr):
    pointer = sums + part * (SHAPE.group * SHAPE.head_dim)
    mask = inside[:, None] & (head[None, :] < SHAPE.group)
    tl.store(pointer + head[None, :] * SHAPE.head_dim + channel[:, None], result, mask=mask)


# --- pages of codes ------------------------------------------------------------------------------------------


@triton.jit
def _attend_codes(
    q,
    coded_q,
    kept_q,
    records,
    page_stride,
    table,
    first_page,
    end_page,
    first_token,
    end_token,
    mean,
    rope_cos,
    rope_sin,
    rotation,
    scale,
    stats,
    sums,
    SHAPE: tl.constexpr,
    TUNING: tl.constexpr,
):
    """Pages `first_page` to `end_page`; of the coded tokens in them, `first_token` to `end_token` are seen."""
    KEY: tl.constexpr = SHAPE.keys
    VALUE: tl.constexpr = SHAPE.values
    KEY_PLANES: tl.constexpr = KEY.planes
    VALUE_PLANES: tl.constexpr = VALUE.planes
    KEPT: tl.constexpr = SHAPE.num_kept
    TILES: tl.constexpr = _PAGE_SIZE // TUNING.tile
    HALF: tl.constexpr = SHAPE.head_dim // 2
    lane, head, row = tl.arange(0, TUNING.warps), tl.arange(0, SHAPE.heads), tl.arange(0, TUNING.tile)
    token_of_row = row % _SIDE * _SIDE + row // _SIDE
    key_word, value_word = tl.arange(0, KEY.padded_words), tl.arange(0, VALUE.padded_words)
    key_inside, value_inside = key_word < KEY.words, value_word < VALUE.words

    largest = tl.full([SHAPE.heads], 0.0, tl.float32)
    for plane in tl.static_range(KEY_PLANES):
        x = _load_query(coded_q, plane * KEY.words + key_word, key_inside, head, SHAPE)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
    normaliser = _normaliser(largest)
    # Of a score in terms of operands of keys and query, which is how all that is added to it is measured.
    unit = scale / normaliser * common_factor(KEY.bits)
    operands, sum_q = (), tl.full([SHAPE.heads], 0.0, tl.float32)
    for plane in tl.static_range(KEY_PLANES):
        x = _load_query(coded_q, plane * KEY.words + key_word, key_inside, head, SHAPE)
        coded = (x * (normaliser * factor(plane, KEY.bits))[None, :]).to(tl.float16)
        operands += (_per_warp(coded, TUNING),)
        sum_q += tl.sum(coded.to(tl.float32), 0) * (1 / factor(plane, KEY.bits) / common_factor(KEY.bits))
    if KEY.grid == "packed":
        sum_q *= OFFSET_STEP
    kept_operands = ()
    for index in tl.static_range(KEPT):
        x = tl.load(kept_q + head * KEPT + index, mask=head < SHAPE.group, other=0.0)
        kept_operands += (x * (normaliser / common_factor(KEY.bits)),)
    if mean is not None:
        # q . R(t) mean is a sum over rotary pairs: along * cos + across * sin of the pair's angle at t. That angle is
        # one up to the tile's first token, which turns (along, across) once per tile, and one within the tile, which
        # is the same for all tiles: here, and only here, all warps work on one product together.
        pair = tl.arange(0, SHAPE.channels // 2)
        pair_inside = pair < HALF
        q_0, q_1 = (
            _load_query(q, pair, pair_inside, head, SHAPE),
            _load_query(q, HALF + pair, pair_inside, head, SHAPE),
        )
        mean_0 = tl.load(mean + pair, mask=pair_inside, other=0.0)[:, None]
        mean_1 = tl.load(mean + HALF + pair, mask=pair_inside, other=0.0)[:, None]
        along, across = q_0 * mean_0 + q_1 * mean_1, q_1 * mean_0 - q_0 * mean_1
        mean_normaliser = _normaliser(tl.max(tl.maximum(tl.abs(along), tl.abs(across)), 0))
        mean_unit = normaliser / mean_normaliser / common_factor(KEY.bits)
        along, across = (along * mean_normaliser[None, :])[None], (across * mean_normaliser[None, :])[None]
        within = rotation + token_of_row[:, None] * HALF + pair[None, :]
        cos_within = tl.load(within, mask=pair_inside[None, :], other=0.0)
        sin_within = tl.load(within + _PAGE_SIZE * HALF, mask=pair_inside[None, :], other=0.0)

    highest = tl.full([TUNING.warps, SHAPE.heads], _LOWEST, tl.float32)
    total = tl.full([TUNING.warps, SHAPE.heads], 0.0, tl.float32)
    offset = tl.full([TUNING.warps, SHAPE.heads], 0.0, tl.float32)
    results = ()
    for _plane in tl.static_range(VALUE_PLANES):
        results += (tl.full([TUNING.warps, VALUE.padded_words, SHAPE.heads], 0.0, tl.float32),)

    for tile in tl.range(first_page * TILES, end_page * TILES, TUNING.warps, num_stages=TUNING.stages):
        page = (tile + lane) // TILES
        inside = page < end_page
        # In the order of slots, the tokens of a tile are those of the page's first tile, and a constant more.
        first = (tile + lane) % TILES * (TUNING.tile // _SIDE)
        slot, token = (first * _SIDE)[:, None] + row[None, :], first[:, None] + token_of_row[None, :]
        visible = _visible(page[:, None] * _PAGE_SIZE + token, first_token, end_token, SHAPE)
        units = wide_product(tl.load(table + page, mask=inside, other=0), page_stride)
        record = records + units * _WORDS_PER_UNIT

        if mean is not None:
            angle = (SHAPE.sinks + page * _PAGE_SIZE + first).to(tl.int64)[:, None] * HALF + pair[None, :]
            angle_inside = inside[:, None] & pair_inside[None, :]
            cos = tl.load(rope_cos + angle, mask=angle_inside, other=0.0)[:, :, None]
            sin = tl.load(rope_sin + angle, mask=angle_inside, other=0.0)[:, :, None]
            removed = tl.dot(cos_within, _side_by_side(along * cos + across * sin, SHAPE, TUNING))
            removed = tl.dot(sin_within, _side_by_side(across * cos - along * sin, SHAPE, TUNING), removed)
            removed = tl.permute(tl.reshape(removed, [TUNING.tile, TUNING.warps, SHAPE.heads]), (1, 0, 2))

        key_words = tl.load(
            record[:, None, None] + KEY.codes + slot[:, :, None] * KEY.words + key_word[None, None, :],
            mask=key_inside[None, None, :],
            other=0,
        )
        scores = tl.full([TUNING.warps, TUNING.tile, SHAPE.heads], 0.0, tl.float32)
        for plane in tl.static_range(KEY_PLANES):
            scores = tl.dot(operand(key_words, plane, KEY.bits), operands[plane], scores)
        key_scale, key_offset = load_grid(record + KEY.scales, first, token, inside, TUNING.tile, KEY)
        if KEY.grid == "packed":
            scores = (scores + key_offset[:, :, None] * sum_q[None, None, :]) * key_scale[:, :, None]
        elif KEY.grid == "fp16":
            scores = scores * key_scale[:, :, None] + key_offset[:, :, None] * sum_q[None, None, :]
        else:
            scores *= key_scale[:, :, None]
        for index in tl.static_range(KEPT // 2):
            kept = load_words(record + SHAPE.kept, token, inside, KEPT // 2, index)
            scores += low_f16(kept)[:, :, None] * kept_operands[2 * index][None, None, :]
            scores += high_f16(kept)[:, :, None] * kept_operands[2 * index + 1][None, None, :]
        if mean is not None:
            scores += removed * mean_unit[None, None, :]

        weights, decay, highest, total = _softmax_step(scores, unit, visible, highest, total, headroom(VALUE.bits))

        value_words = tl.load(
            record[:, None, None] + VALUE.codes + value_word[None, :, None] * _PAGE_SIZE + slot[:, None, :],
            mask=value_inside[None, :, None],
            other=0,
        )
        value_scale, value_offset = load_grid(record + VALUE.scales, first, token, inside, TUNING.tile, VALUE)
        # What nobody wrote must not spoil the sums; there is a weight of zero beside it, but perhaps a NaN.
        value_scale = tl.where(visible, value_scale, 0.0)
        scaled = weights * value_scale[:, :, None]
        if VALUE.grid == "packed":
            offset = offset * decay + tl.sum(scaled * value_offset[:, :, None], 1)
        elif VALUE.grid == "fp16":
            value_offset = tl.where(visible, value_offset, 0.0)
            offset = offset * decay + tl.sum(weights * value_offset[:, :, None], 1)
        scaled = scaled.to(tl.float16)
        added = ()
        for plane in tl.static_range(VALUE_PLANES):
            decayed = results[plane] * decay[:, None, :]
            added += (tl.dot(operand(value_words, plane, VALUE.bits), scaled, decayed),)
        results = added

    part = _this_part()
    share = _store_stats(stats, part, highest, total, unit, head, SHAPE, headroom(VALUE.bits))
    offset = tl.sum(offset * share, 0)
    if VALUE.grid == "packed":
        offset *= OFFSET_STEP
    for plane in tl.static_range(VALUE_PLANES):
        result = tl.sum(results[plane] * share[:, None, :], 0)
        result = result * (factor(plane, VALUE.bits) * common_factor(VALUE.bits)) + offset[None, :]
        _store_sums(sums, part, result, plane * VALUE.words + value_word, value_inside, head, SHAPE)


# --- windows and pages in 16 bit -----------------------------------------------------------------------------


@triton.jit
def _wide_query(q, channel, head, scale, SHAPE: tl.constexpr, TUNING: tl.constexpr):
    """The query as an operand for keys in 16 bit, and the unit of its scores."""
    x = _load_query(q, channel, channel < SHAPE.head_dim, head, SHAPE)
    normaliser = _normaliser(tl.max(tl.abs(x), 0))
    return _per_warp((x * normaliser[None, :]).to(tl.float16), TUNING), scale / normaliser


@triton.jit
def _wide_step(
    wide_q,
    unit,
    keys,
    values,
    visible,
    channel,
    highest,
    total,
    result,
    SHAPE: tl.constexpr,
    APART: tl.constexpr,
):
    """One tile of tokens in 16 bit, by pointers [lanes, tokens] to keys and values; only what is visible is read.
    APART: values are not asked for before keys are done with, which takes fewer registers, and no loop with such a
    barrier in it is pipelined."""
    mask = visible[:, :, None] & (channel[None, None, :] < SHAPE.head_dim)
    keys = tl.load(keys[:, :, None] + channel[None, None, :], mask=mask, other=0)
    scores = tl.dot(bf16_operand(keys), wide_q)
    weights, decay, highest, total = _softmax_step(scores, unit, visible, highest, total, 0)
    if APART:
        tl.debug_barrier()
    values = tl.load(values[:, :, None] + channel[None, None, :], mask=mask, other=0)
    values = tl.permute(bf16_operand(values), (0, 2, 1))
    return highest, total, tl.dot(values, weights.to(tl.float16), result * decay[:, None, :])


@triton.jit
def _attend_wide_pages(
    q,
    records,
    page_stride,
    table,
    first_page,
    end_page,
    first_token,
    end_token,
    scale,
    stats,
    sums,
    SHAPE: tl.constexpr,
    TUNING: tl.constexpr,
):
    """As `_attend_codes`, of pages that code nothing: their planes are [tokens, channels]."""
    TILES: tl.constexpr = _PAGE_SIZE // TUNING.tile
    lane, head, channel = tl.arange(0, TUNING.warps), tl.arange(0, SHAPE.heads), tl.arange(0, SHAPE.channels)
    wide_q, unit = _wide_query(q, channel, head, scale, SHAPE, TUNING)
    highest = tl.full([TUNING.warps, SHAPE.heads], _LOWEST, tl.float32)
    total = tl.full([TUNING.warps, SHAPE.heads], 0.0, tl.float32)
    result = tl.full([TUNING.warps, SHAPE.channels, SHAPE.heads], 0.0, tl.float32)
    for tile in tl.range(first_page * TILES, end_page * TILES, TUNING.warps, num_stages=TUNING.stages):
        page = (tile + lane) // TILES
        inside = page < end_page
        token = ((tile + lane) % TILES * TUNING.tile)[:, None] + tl.arange(0, TUNING.tile)[None, :]
        number = page[:, None] * _PAGE_SIZE + token
        visible = _visible(number, first_token, end_token, SHAPE)
        units = wide_product(tl.load(table + page, mask=inside, other=0), page_stride)
        record = records + units * _WORDS_PER_UNIT
        rows = record[:, None] + token * SHAPE.head_dim
        highest, total, result = _wide_step(
            wide_q,
            unit,
            rows + SHAPE.keys.codes,
            rows + SHAPE.values.codes,
            visible,
            channel,
            highest,
            total,
            result,
            SHAPE,
            TUNING.stages == 1,
        )
    part = _this_part()
    share = _store_stats(stats, part, highest, total, unit, head, SHAPE, 0)
    result = tl.sum(result * share[:, None, :], 0)
    _store_sums(sums, part, result, channel, channel < SHAPE.head_dim, head, SHAPE)


@triton.jit
def _attend_window(
    q, keys, values, first, end, length, scale, stats, sums, SHAPE: tl.constexpr, TUNING: tl.constexpr
):
    """Window slots `first` to `end`, all of which hold a token, of a sequence of `length` tokens."""
    lane, head, channel = tl.arange(0, TUNING.warps), tl.arange(0, SHAPE.heads), tl.arange(0, SHAPE.channels)
    wide_q, unit = _wide_query(q, channel, head, scale, SHAPE, TUNING)
    highest = tl.full([TUNING.warps, SHAPE.heads], _LOWEST, tl.float32)
    total = tl.full([TUNING.warps, SHAPE.heads], 0.0, tl.float32)
    result = tl.full([TUNING.warps, SHAPE.channels, SHAPE.heads], 0.0, tl.float32)
    for tile in range(first, end, TUNING.warps * TUNING.wide_tile):
        slot = tile + lane[:, None] * TUNING.wide_tile + tl.arange(0, TUNING.wide_tile)[None, :]
        visible = slot < end
        if SHAPE.sliding_window is not None:
            # The ring's slots hold the latest tokens: a slot's position is the last one that falls on it.
            age = tl.where(slot < SHAPE.sinks, length - 1 - slot, (length - 1 - slot) % max(1, SHAPE.ring))
            visible &= age < SHAPE.sliding_window
        rows = slot * SHAPE.head_dim
        highest, total, result = _wide_step(
            wide_q, unit, keys + rows, values + rows, visible, channel, highest, total, result, SHAPE, True
        )
    part = _this_part()
    share = _store_stats(stats, part, highest, total, unit, head, SHAPE, 0)
    result = tl.sum(result * share[:, None, :], 0)
    _store_sums(sums, part, result, channel, channel < SHAPE.head_dim, head, SHAPE)


# --- the last program's part ---------------------------------------------------------------------------------


@triton.jit
def _merge_stats(stats, head, window_parts, page_parts, sink_logits, SHAPE: tl.constexpr):
    """Maximum and sum of weights over all splits, and the learned sink: [heads] each."""
    highest = tl.full([SHAPE.heads], _LOWEST, tl.float32)
    # Heads that pad the group have no weights: 1 keeps them from 0 / 0.
    total = (head >= SHAPE.group).to(tl.float32)
    if sink_logits is not None:
        highest = tl.load(sink_logits + head, mask=head < SHAPE.group, other=0.0).to(tl.float32) * _LOG2_E
        total += 1.0
    for first in range(0, SHAPE.window_splits + page_parts, _PARTS_AT_ONCE):
        part = first + tl.arange(0, _PARTS_AT_ONCE)
        written = (part < window_parts) | ((part >= SHAPE.window_splits) & (part < SHAPE.window_splits + page_parts))
        mask = written[:, None] & (head[None, :] < SHAPE.group)
        pointer = stats + part[:, None] * (2 * SHAPE.group) + head[None, :]
        maxima = tl.load(pointer, mask=mask, other=_LOWEST, cache_modifier=".cg")
        sums = tl.load(pointer + SHAPE.group, mask=mask, other=0.0, cache_modifier=".cg")
        raised = tl.maximum(highest, tl.max(maxima, 0))
        total = total * tl.exp2(highest - raised) + tl.sum(sums * tl.exp2(maxima - raised[None, :]), 0)
        highest = raised
    return highest, total


@triton.jit
def _add_parts(stats, sums, first, end, channel, highest, head, SHAPE: tl.constexpr, TUNING: tl.constexpr):
    """Weighted sums of values [channels, heads] of the splits `first` to `end`, added up in their order."""
    PARTS: tl.constexpr = max(1, _SUMS_PER_WARP * TUNING.warps // channel.shape[0])
    result = tl.full([channel.shape[0], SHAPE.heads], 0.0, tl.float32)
    for start in range(first, end, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < end)[:, None] & (head[None, :] < SHAPE.group)
        pointer = stats + part[:, None] * (2 * SHAPE.group) + head[None, :]
        weight = tl.exp2(tl.load(pointer, mask=mask, other=_LOWEST, cache_modifier=".cg") - highest[None, :])
        pointer = sums + (part[:, None, None] * SHAPE.group + head[None, None, :]) * SHAPE.head_dim
        mask = mask[:, None, :] & (channel[None, :, None] < SHAPE.head_dim)
        values = tl.load(pointer + channel[None, :, None], mask=mask, other=0.0, cache_modifier=".cg")
        result += tl.sum(values * weight[:, None, :], 0)
    return result


@triton.jit
def _reduce(
    stats,
    sums,
    window_parts,
    page_parts,
    output_matrix,
    sink_logits,
    out,
    SHAPE: tl.constexpr,
    TUNING: tl.constexpr,
):
    head, channel = tl.arange(0, SHAPE.heads), tl.arange(0, SHAPE.channels)
    inside = channel < SHAPE.head_dim
    highest, total = _merge_stats(stats, head, window_parts, page_parts, sink_logits, SHAPE)
    result = _add_parts(stats, sums, 0, window_parts, channel, highest, head, SHAPE, TUNING)
    first, end = SHAPE.window_splits, SHAPE.window_splits + page_parts
    if output_matrix is None:
        result += _add_parts(stats, sums, first, end, channel, highest, head, SHAPE, TUNING)
    else:
        for start in range(0, SHAPE.channels, _CHANNELS_AT_ONCE):
            coded = start + tl.arange(0, _CHANNELS_AT_ONCE)
            part = _add_parts(stats, sums, first, end, coded, highest, head, SHAPE, TUNING)
            mask = inside[:, None] & (coded[None, :] < SHAPE.head_dim)
            matrix = tl.load(output_matrix + coded[None, :] * SHAPE.channels + channel[:, None], mask=mask, other=0.0)
            result = tl.dot(matrix, part, result, input_precision="tf32x3")
    result = (result / total[None, :]).to(out.dtype.element_ty)
    mask = inside[:, None] & (head[None, :] < SHAPE.group)
    tl.store(out + head[None, :] * SHAPE.head_dim + channel[:, None], result, mask=mask)


@triton.jit
def _store_zeros(out, SHAPE: tl.constexpr):
    head, channel = tl.arange(0, SHAPE.heads)[:, None], tl.arange(0, SHAPE.channels)[None, :]
    zeros = tl.full([SHAPE.heads, SHAPE.channels], 0.0, out.dtype.element_ty)
    mask = (head < SHAPE.group) & (channel < SHAPE.head_dim)
    tl.store(out + head * SHAPE.head_dim + channel, zeros, mask=mask)


@triton.jit
def _extent(context_len, window_slot, pages_per_split, SHAPE: tl.constexpr):
    """What this program's sequence has to read, and in how many parts."""
    row = _program_id(2)
    length = tl.load(context_len + row) + 1
    if tl.load(window_slot + row) < 0:
        length = 0
    in_window = tl.minimum(length, SHAPE.sinks + SHAPE.ring)
    end_token = length - in_window
    first_token = 0
    if SHAPE.sliding_window is not None:
        first_token = tl.minimum(tl.maximum(length - SHAPE.sliding_window - SHAPE.sinks, 0), end_token)
    first_page = first_token // _PAGE_SIZE
    pages = tl.cdiv(end_token, _PAGE_SIZE) - first_page
    fewest = tl.maximum(pages_per_split, tl.minimum(tl.cdiv(pages, _FEW_SPLITS), 2 * pages_per_split))
    pages_per_part = tl.maximum(tl.cdiv(pages, _num_programs(0) - SHAPE.window_splits), fewest)
    window_parts, page_parts = tl.cdiv(in_window, _WINDOW_SPLIT), tl.cdiv(pages, pages_per_part)
    return length, in_window, first_token, end_token, first_page, pages_per_part, window_parts, page_parts


@triton.jit(do_not_specialize=["pages_per_split"])
def decode_kernel(
    q,
    coded_q,
    kept_q,
    pages,
    windows,
    context_len,
    block_table,
    window_slot,
    mean,
    rope_cos,
    rope_sin,
    rotation,
    output_matrix,
    sink_logits,
    stats,
    sums,
    arrived,
    out,
    scale,  # times log2 e: all exponentials are powers of two
    page_stride,
    record_stride,
    window_stride,
    values_stride,
    window_head_stride,
    table_stride,
    pages_per_split,
    SHAPE: tl.constexpr,
    TUNING: tl.constexpr,
):
    """One split of one sequence and KV head; of the last one to arrive, the sum of all splits as well.

    Grid: (window_splits + page_splits, num_kv_heads, batch). The arguments are those of `decode_arguments`.
    """
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = row * tl.num_programs(1) + kv_head
    queries = pair.to(tl.int64) * (SHAPE.group * SHAPE.head_dim)
    length, in_window, first_token, end_token, first_page, pages_per_part, window_parts, page_parts = _extent(
        context_len, window_slot, pages_per_split, SHAPE
    )
    if split < SHAPE.window_splits:
        works = split < window_parts
        if works:
            slot = tl.load(window_slot + row).to(tl.int64)
            keys = windows + (slot * window_stride + kv_head * window_head_stride) * _WORDS_PER_UNIT
            values = keys + values_stride.to(tl.int64) * _WORDS_PER_UNIT
            first = split * _WINDOW_SPLIT
            end = tl.minimum(first + _WINDOW_SPLIT, in_window)
            _attend_window(q + queries, keys, values, first, end, length, scale, stats, sums, SHAPE, TUNING)
    else:
        part = split - SHAPE.window_splits
        works = part < page_parts
        if works:
            first = first_page + part * pages_per_part
            end_token = tl.minimum(end_token, (first + pages_per_part) * _PAGE_SIZE)
            end = tl.cdiv(end_token, _PAGE_SIZE)
            records = pages + kv_head.to(tl.int64) * record_stride * _WORDS_PER_UNIT
            table = block_table + row.to(tl.int64) * table_stride
            if SHAPE.keys.grid is None:
                _attend_wide_pages(
                    q + queries,
                    records,
                    page_stride,
                    table,
                    first,
                    end,
                    first_token,
                    end_token,
                    scale,
                    stats,
                    sums,
                    SHAPE,
                    TUNING,
                )
            else:
                _attend_codes(
                    q + queries,
                    coded_q + queries,
                    None if kept_q is None else kept_q + pair * (SHAPE.group * SHAPE.num_kept),
                    records,
                    page_stride,
                    table,
                    first,
                    end,
                    first_token,
                    end_token,
                    None if mean is None else mean + kv_head * SHAPE.head_dim,
                    rope_cos,
                    rope_sin,
                    rotation,
                    scale,
                    stats,
                    sums,
                    SHAPE,
                    TUNING,
                )
    if works:
        # All warps have stored their part before the counter says so; that also acquires what others have stored.
        tl.debug_barrier()
        # All of this anew: no register holds it during the loop.
        extent = _extent(context_len, window_slot, pages_per_split, SHAPE)
        window_parts, page_parts = extent[6], extent[7]
        pair, kv_head = _this_pair(), _program_id(1)
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == window_parts + page_parts - 1:
            if output_matrix is not None:
                output_matrix += kv_head * (SHAPE.head_dim * SHAPE.channels)
            if sink_logits is not None:
                sink_logits += kv_head * SHAPE.group
            part = pair.to(tl.int64) * _num_programs(0)
            _reduce(
                stats + part * (2 * SHAPE.group),
                sums + part * (SHAPE.group * SHAPE.head_dim),
                window_parts,
                page_parts,
                output_matrix,
                sink_logits,
                out + pair.to(tl.int64) * (SHAPE.group * SHAPE.head_dim),
                SHAPE,
                TUNING,
            )
            tl.store(arrived + pair, 0)
    elif (_program_id(0) == 0) & (tl.load(window_slot + _program_id(2)) < 0):
        _store_zeros(out + _this_pair().to(tl.int64) * (SHAPE.group * SHAPE.head_dim), SHAPE)
