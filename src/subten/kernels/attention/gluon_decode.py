"""Device kernel of `kv_attention` for decoding from `kv2` pages on sm_90: Gluon, which is Triton with layouts by hand.

One launch, as in triton_decode.py, which serves all other formats and GPUs and is the one to read first: a program
takes some pages of one sequence and KV head (the first one the 16-bit windows before them), and the last to arrive
adds up what all have found, in their order. What differs is how a warp works through a page (docs/kernels/attention.md
has the reasons and the measurements):

- q . k is a product of small integers. Codes are 0..3, or 0..12 where they stay two bits further up, four channels
  per byte of int8; the query is an integer of 15 bits in two halves, which are neighbouring columns of the tensor
  core's tile. `append_decode` leaves it so.
- p . v is a product of fp16 numbers, where codes are subnormal ones. P comes from the first product's result to the
  second's operand by transposing 8 x 8 fragments within the warp (movmatrix).
- Maxima are raised, and sums decay, only when that is needed to stay in range.
- Each warp asks for its next page, so that it is in the L2 cache when it gets there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from subten.errors import KernelUnavailableError
from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.gluon_layouts import (
    blocks_layout,
    fragment_layout,
    fragments_layout,
    grids_layout,
    half_values_layout,
    keys_layout,
    matrix_layout,
    mma_layout,
    part_layout,
    scores_layout,
    table_layout,
)
from subten.kernels.attention.gluon_plan import GluonPlan, GluonShape, plan_gluon, why_not_gluon
from subten.kernels.attention.gluon_ptx import (
    decayed,
    exp2,
    float_of_bits,
    grid_offset,
    grid_scale,
    high_half,
    key_plane,
    low_half,
    prefetch,
    raised,
    small_float,
    transposed,
    value_plane,
)
from subten.kernels.attention.inputs import AttentionInputs
from subten.kernels.attention.triton_append import DecodeQuery

_LOWEST = gl.constexpr(-1e30)
"""Start of a running maximum: finite, so that a warp which has seen no key yet does not become NaN."""
_LOG2_E = gl.constexpr(math.log2(math.e))
_PARTS_AT_ONCE = gl.constexpr(8)
"""Parts that the last program has in flight."""
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7
_BYTES_PER_UNIT = 16
"""Pages are so many bytes apart, times the stride that the kernel is given: it fits an int32."""


@dataclass(frozen=True)
class GluonScratch:
    """Memory through which the programs of a launch pass results on; one serves all layers in turn, on one stream.

    Attributes:
        stats: float32 [batch, num_kv_heads * blocks of heads, parts, 2, heads], largest score (times log2 e) and sum of
            weights.
        sums: float32 [batch, num_kv_heads * blocks, parts, heads / 4, head_dim * 4], weighted sums of values, in the
            order of the tensor core's fragments.
        arrived: int32 [batch, num_kv_heads * blocks], programs that have left their results; zero between launches.
    """

    stats: Tensor
    sums: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, query: DecodeQuery, layer: PagedLayers, plan: GluonPlan) -> GluonScratch:
        """For such queries over `layer`, and over all layers of its format and shape."""
        (batch, num_heads, head_dim), num_kv_heads = query.q.shape, layer.pages.shape[2]
        shape = GluonShape.of(layer.layout, num_heads // num_kv_heads, removed_mean=False)
        pairs, parts = num_kv_heads * shape.blocks, plan.splits + 1
        return cls(
            query.q.new_empty(batch, pairs, parts, 2, 4 * shape.tiles, dtype=torch.float32),
            query.q.new_empty(batch, pairs, parts, shape.tiles, 4 * head_dim, dtype=torch.float32),
            query.q.new_zeros(batch, pairs, dtype=torch.int32),
        )


def attend_decode(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: GluonPlan | None = None,
    scratch: GluonScratch | None = None,
    *,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over one layer's cache.

    The host reads nothing back, so that a CUDA graph can capture the call.

    Args:
        query: what `append_decode` returned for this step, with `integer` asked for.
        layer: one layer, this step's tokens appended.
        inputs: the batch; the new token of each sequence is at position `context_len`. Of sequences with a negative
            `window_slot` (which fill up a batch) nothing is read, and the result is zero.
        scale: factor of q . k.
        plan: how the launch is split. By default, for sequences as long as the block table is wide.
        scratch: for this plan and these shapes. By default allocated, which is one more launch.
        sliding_window: tokens that a query sees, itself included; None means all.
        sink_logits: float32 [num_heads], the score of a key without a value that each head sees besides (learned
            attention sinks, as in gpt-oss); `scale` does not apply to it.

    Returns:
        [batch, num_heads, head_dim] in q's dtype.

    Raises:
        KernelUnavailableError: the kernel does not serve the format or head_dim.
    """
    reason = why_not_gluon(layer.layout)
    if reason is not None:
        raise KernelUnavailableError(reason)
    group = query.q.shape[1] // layer.pages.shape[2]
    shape = GluonShape.of(layer.layout, group, layer.tables.mean is not None, sliding_window)
    plan = plan or _default_plan(query, layer, inputs.block_table.shape[1], shape)
    scratch = scratch or GluonScratch.allocate(query, layer, plan)
    out = torch.empty_like(query.q, memory_format=torch.contiguous_format)
    arguments = decode_arguments(query, layer, inputs, scale, plan, scratch, shape, sink_logits, out)
    decode_kernel[(plan.splits, layer.pages.shape[2] * shape.blocks, len(query.q))](
        **arguments, num_warps=plan.tuning.warps, maxnreg=plan.tuning.registers
    )
    return out


def prepare_decode(
    query: DecodeQuery, layer: PagedLayers, max_pages: int, *, sliding_window: int | None = None
) -> tuple[GluonPlan, GluonScratch]:
    """Plan and scratch of `attend_decode`, for all steps and layers of these shapes and sequences of `max_pages`."""
    group = query.q.shape[1] // layer.pages.shape[2]
    shape = GluonShape.of(layer.layout, group, layer.tables.mean is not None, sliding_window)
    plan = _default_plan(query, layer, max_pages, shape)
    return plan, GluonScratch.allocate(query, layer, plan)


def _default_plan(query: DecodeQuery, layer: PagedLayers, max_pages: int, shape: GluonShape) -> GluonPlan:
    device = query.q.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return plan_gluon(shape, len(query.q), layer.pages.shape[2], max_pages, num_sms)


DECODE = DecodeKernel(attend_decode, prepare_decode, integer_query=True)


def decode_arguments(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: GluonPlan,
    scratch: GluonScratch,
    shape: GluonShape,
    sink_logits: Tensor | None,
    out: Tensor,
) -> dict[str, Any]:
    """All arguments of `decode_kernel`; see `attend_decode`."""
    tables, pages, windows = layer.tables, layer.pages[0].view(torch.int16), layer.windows[0]
    gluon_tables = tables.gluon
    assert query.steps is not None
    assert query.numbers is not None
    assert gluon_tables is not None
    return {
        "q": query.q,
        "steps": query.steps,
        "numbers": query.numbers,
        "pages": pages,
        "windows": windows,
        "context_len": inputs.context_len,
        "block_table": inputs.block_table,
        "window_slot": inputs.window_slot,
        "mean": tables.mean,
        "within": gluon_tables.within if shape.removed_mean else None,
        "rope_cos": tables.rope and tables.rope.cos,
        "rope_sin": tables.rope and tables.rope.sin,
        "output_matrix": gluon_tables.output_matrix,
        "matrix_scale": gluon_tables.output_scale,
        "sink_logits": sink_logits,
        "stats": scratch.stats,
        "sums": scratch.sums,
        "arrived": scratch.arrived,
        "out": out,
        "scale": scale * _LOG2_E.value,
        "page_stride": pages.stride(0) * pages.itemsize // _BYTES_PER_UNIT,
        "record_stride": pages.stride(1),
        "window_stride": windows.stride(0),
        "values_stride": windows.stride(1),
        "window_head_stride": windows.stride(2),
        "table_stride": inputs.block_table.stride(0),
        "pages_per_split": plan.pages_per_split,
        "SHAPE": shape,
        "WARPS": plan.tuning.warps,
    }


# --- coded pages ---------------------------------------------------------------------------------------------


@gluon.jit
def two_key_planes(words, PLANE: gl.constexpr, KA: gl.constexpr):
    """[warps, 64, 16] to an operand [warps, 64, 32]."""
    both = gl.permute(gl.join(key_plane(words, PLANE), key_plane(words, PLANE + 1)), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 64, 32]), KA, assert_trivial=True)


@gluon.jit
def two_value_planes(words, PLANE: gl.constexpr, VA: gl.constexpr):
    """[warps, 8, 64] to an operand [warps, 16, 64]."""
    both = gl.permute(gl.join(value_plane(words, PLANE), value_plane(words, PLANE + 1)), [0, 3, 1, 2])
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 16, 64]), VA, assert_trivial=True)


@gluon.jit
def by_row(x, R: gl.constexpr):
    """What belongs to token 8 r + x [warps, r, x], to row 8 x + r of the scores."""
    return gl.convert_layout(gl.reshape(gl.permute(x, [0, 2, 1]), [x.shape[0], 64]), R, assert_trivial=True)


@gluon.jit
def by_block(x, BL: gl.constexpr):
    x = gl.convert_layout(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), gl.SliceLayout(3, BL), assert_trivial=True)
    return x[:, :, :, None]


@gluon.jit
def table_operand(at, MA: gl.constexpr, W: gl.constexpr):
    """Rotations within a page, as they lie in memory, to the operand [warps, 64 tokens, 32]."""
    x = gl.permute(gl.reshape(gl.load(at), [2, 4, 8, 4, 2, 2, 2]), [1, 5, 2, 3, 0, 4, 6])
    x = gl.convert_layout(gl.reshape(x, [64, 32]), gl.SliceLayout(0, MA), assert_trivial=True)
    return x[None].broadcast_to([W, 64, 32])


@gluon.jit
def store_turns(q, mean, head, turns, MB: gl.constexpr, SHAPE: gl.constexpr):
    """q . (rotated mean) is a sum over rotary pairs of along * cos + across * sin of the pair's angle. Leaves both in
    shared memory, chunks of [8 heads, 32 pairs], normalised; returns the unit."""
    HALF: gl.constexpr = SHAPE.head_dim // 2
    CHUNKS: gl.constexpr = HALF // 32
    L: gl.constexpr = gl.SliceLayout(0, MB)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    h = (head + column // 2 + 4 * (column % 2))[None, :]
    live = (h < SHAPE.group) & ((column % 2)[None, :] < SHAPE.tiles)
    largest = 0.0
    along, across = (), ()
    for c in gl.static_range(CHUNKS):
        pair = 32 * c + gl.arange(0, 32, layout=gl.SliceLayout(1, L))[:, None]
        q_0 = gl.load(q + h * SHAPE.head_dim + pair, mask=live, other=0.0).to(gl.float32)
        q_1 = gl.load(q + h * SHAPE.head_dim + HALF + pair, mask=live, other=0.0).to(gl.float32)
        m_0, m_1 = gl.load(mean + pair), gl.load(mean + HALF + pair)
        along += (q_0 * m_0 + q_1 * m_1,)
        across += (q_1 * m_0 - q_0 * m_1,)
        largest = gl.maximum(largest, gl.max(gl.max(gl.maximum(gl.abs(along[c]), gl.abs(across[c])), 0), 0))
    unit = gl.maximum(largest, 1e-20) / 64.0
    for c in gl.static_range(CHUNKS):
        turns.index(2 * c).permute([1, 0]).store(along[c] / unit)
        turns.index(2 * c + 1).permute([1, 0]).store(across[c] / unit)
    return unit


@gluon.jit
def attend_codes(
    q,
    steps,
    numbers,
    records,
    page_stride,
    table,
    first_page,
    end_page,
    first_token,
    end_token,
    head,
    scale,
    mean,
    within,
    rope_cos,
    rope_sin,
    stats,
    sums,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    W: gl.constexpr = WARPS
    D: gl.constexpr = SHAPE.head_dim
    WORDS: gl.constexpr = D // 8
    TILES: gl.constexpr = SHAPE.tiles
    CHUNKS: gl.constexpr = D // 64
    MMA: gl.constexpr = mma_layout(W)
    KEY_K: gl.constexpr = max(32, D // 4)
    KA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 if D == 64 else 8)
    QB: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 if D == 64 else 8)
    VA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SC: gl.constexpr = scores_layout(W, 64)
    BL: gl.constexpr = blocks_layout(W, 8)
    FR: gl.constexpr = fragments_layout(W, 8)
    GR: gl.constexpr = grids_layout(W)
    KEYS: gl.constexpr = keys_layout(W, D // 4)
    VALUES: gl.constexpr = half_values_layout(W) if D == 64 else VA
    R: gl.constexpr = gl.SliceLayout(2, SC)
    H: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SC))
    L3: gl.constexpr = gl.SliceLayout(1, BL)
    WL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, GR))

    RECORD: gl.constexpr = 2 * (SHAPE.kept + 128)
    OPERANDS: gl.constexpr = 2 if D == 64 else 4
    units, offsets, kept_a, kept_b, operands = (), (), (), (), ()
    byte = gl.arange(0, KEY_K, layout=gl.SliceLayout(1, gl.SliceLayout(0, QB)))[:, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, QB)))[None, :]
    heads = gl.arange(0, 4, layout=H)
    for t in gl.static_range(TILES):
        # Heads that fill up a tile are zero: their memory is never written, and all heads of a warp raise their maxima
        # together.
        for i in gl.static_range(OPERANDS):
            live = head + 4 * t + column // 2 < SHAPE.group
            place = steps + (t * 8 * D + i * (8 * KEY_K)) + column * KEY_K + byte
            operands += (gl.load(place, mask=live, other=0)[None].broadcast_to([W, KEY_K, 8]),)
        live = head + 4 * t + heads < SHAPE.group
        of_head = numbers + (4 * t + heads) * 4
        units += (gl.load(of_head, mask=live, other=0.0) * scale,)
        offsets += (gl.load(of_head + 1, mask=live, other=0.0) * scale,)
        kept_a += (gl.load(of_head + 2, mask=live, other=0.0) * scale,)
        kept_b += (gl.load(of_head + 3, mask=live, other=0.0) * scale,)
    if SHAPE.removed_mean:
        MB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
        MA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
        turns = gl.allocate_shared_memory(gl.float32, [2 * CHUNKS, 8, 32], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
        mean_units = store_turns(q, mean, head, turns, MB, SHAPE) * scale
        mk = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, MB)))
        TL: gl.constexpr = table_layout(W)
        T0: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TL))))
        T1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TL))))
        T2: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, TL))))
        T3: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, TL))))
        T4: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, TL))))
        within += (
            gl.arange(0, 4, layout=T1)[None, :, None, None, None] * 256
            + gl.arange(0, 8, layout=T2)[None, None, :, None, None] * 32
            + gl.arange(0, 4, layout=T3)[None, None, None, :, None] * 8
            + gl.arange(0, 8, layout=T4)[None, None, None, None, :]
        )
        within += gl.arange(0, 2, layout=T0)[:, None, None, None, None] * 1024

    highest, lengths, zeros, acc = (), (), (), ()
    for _t in gl.static_range(TILES):
        highest += (gl.full([W, 8, 4], _LOWEST, gl.float32, layout=L3),)
        lengths += (gl.full([W, 8, 4], 0.0, gl.float32, layout=L3),)
        zeros += (gl.full([W, 8, 4], 0.0, gl.float32, layout=L3),)
    ROWS: gl.constexpr = max(16, WORDS)
    NUM_ACC: gl.constexpr = D // ROWS
    FOURS: gl.constexpr = NUM_ACC // 4
    for _i in gl.static_range(NUM_ACC):
        acc += (gl.full([W, ROWS, 8], 0.0, gl.float32, layout=MMA),)

    warp = gl.arange(0, W, layout=WL)
    P8 = records.to(gl.pointer_type(gl.int8), bitcast=True)
    P32 = records.to(gl.pointer_type(gl.int32), bitcast=True)
    token_r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, GR)))[None, :, None] * 8
    token_x = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, GR)))[None, None, :]
    # One after the other, so that what differs between the loads of a thread stays a constant in their addresses.
    K0: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, KEYS)))
    K1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, KEYS)))
    K2: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, KEYS)))
    key_x = gl.arange(0, 8, layout=K0)[None, :, None, None] * (2 * D)
    key_r = gl.arange(0, 8, layout=K1)[None, None, :, None] * (D // 4)
    key_byte = gl.arange(0, D // 4, layout=K2)[None, None, None, :]
    value_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(2, VALUES)))[None, :, None] * 64
    value_slot = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, VALUES)))[None, None, :]

    number = gl.load(table + gl.minimum(first_page + warp, end_page - 1))
    number_next = gl.load(table + gl.minimum(first_page + W + warp, end_page - 1))
    for page in range(first_page, end_page, W):
        start = number.to(gl.int64) * page_stride  # in units of 16 bytes
        start_k = gl.convert_layout(
            start, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, KEYS))), assert_trivial=True
        )
        start_v = gl.convert_layout(start, gl.SliceLayout(1, gl.SliceLayout(2, VALUES)), assert_trivial=True)
        key_words = gl.load((P8 + 16 * start_k)[:, None, None, None] + key_r + key_byte + key_x)
        key_words = gl.reshape(key_words, [W, 64, D // 4])
        if D != 64:
            key_words = gl.convert_layout(key_words, KA)
        key_grid = gl.load((records + 8 * start)[:, None, None] + SHAPE.key_scale + token_r + token_x)
        kept = gl.load((P32 + 4 * start)[:, None, None] + SHAPE.kept // 2 + token_r + token_x)
        value_words = gl.load((records + 8 * start_v)[:, None, None] + SHAPE.value_codes + value_word + value_slot)
        value_grid = gl.load((records + 8 * start)[:, None, None] + SHAPE.value_scale + token_r + token_x)
        prefetch(records + number_next.to(gl.int64) * (8 * page_stride), RECORD)
        number, number_next = number_next, gl.load(table + gl.minimum(page + 2 * W + warp, end_page - 1))

        kept = by_row(kept, R)
        kept_0, kept_1 = low_half(kept), high_half(kept)
        key_scale = by_row(grid_scale(key_grid), R).to(gl.float32)
        key_offset = by_row(grid_offset(key_grid), R).to(gl.float32)
        if SHAPE.removed_mean:
            removed = gl.full([W, 64, 8], 0.0, gl.float32, layout=MMA)
            first = gl.minimum(page + warp, end_page - 1)
            first = gl.convert_layout(first, gl.SliceLayout(1, gl.SliceLayout(2, MB)), assert_trivial=True)
            for c in gl.static_range(CHUNKS):
                at = (SHAPE.sinks + 64 * first).to(gl.int64)[:, None] * (D // 2) + (32 * c + mk)[None, :]
                cos, sin = gl.load(rope_cos + at)[:, :, None], gl.load(rope_sin + at)[:, :, None]
                along = turns.index(2 * c).permute([1, 0]).load(gl.SliceLayout(0, MB))[None]
                across = turns.index(2 * c + 1).permute([1, 0]).load(gl.SliceLayout(0, MB))[None]
                u = (along * cos + across * sin).to(gl.float16)
                w = (across * cos - along * sin).to(gl.float16)
                removed = mma_v2(table_operand(within + 2048 * c, MA, W), u, removed)
                removed = mma_v2(table_operand(within + 2048 * (CHUNKS + c), MA, W), w, removed)
            removed_0, removed_1 = gl.split(gl.reshape(removed, [W, 64, 4, 2]))
            removed_ = (
                gl.convert_layout(removed_0, SC, assert_trivial=True),
                gl.convert_layout(removed_1, SC, assert_trivial=True),
            )

        scores = ()
        for t in gl.static_range(TILES):
            s = gl.full([W, 64, 8], 0, gl.int32, layout=MMA)
            if D == 64:
                s = mma_v2(two_key_planes(key_words, 0, KA), operands[2 * t], s)
                s = mma_v2(two_key_planes(key_words, 2, KA), operands[2 * t + 1], s)
            else:
                for p in gl.static_range(4):
                    s = mma_v2(key_plane(key_words, p), operands[4 * t + p], s)
            upper, lower = gl.split(gl.reshape(s, [W, 64, 4, 2]))
            x = small_float(gl.convert_layout(upper * 128 + lower, SC, assert_trivial=True))
            x = (x * units[t][None, None, :] + key_offset[:, :, None] * offsets[t][None, None, :]) * key_scale[
                :, :, None
            ]
            x += kept_0[:, :, None] * kept_a[t][None, None, :]
            x += kept_1[:, :, None] * kept_b[t][None, None, :]
            if SHAPE.removed_mean:
                x += removed_[t] * mean_units
            scores += (gl.convert_layout(gl.reshape(x, [W, 8, 8, 4]), BL, assert_trivial=True),)

        if (page + W) * 64 > end_token or page * 64 < first_token:
            n = (page + warp)[:, None, None] * 64 + token_r + token_x
            seen = (n < end_token) & (n >= first_token)
            value_grid = gl.where(seen, value_grid, 0)
            seen = gl.convert_layout(
                gl.permute(seen.to(gl.int32), [0, 2, 1]), gl.SliceLayout(3, BL), assert_trivial=True
            )
            hidden = ()
            for t in gl.static_range(TILES):
                hidden += (gl.where((seen != 0)[:, :, :, None], scores[t], float("-inf")),)
            scores = hidden

        value_scale = by_row(grid_scale(value_grid), R).to(gl.float32)
        value_offset = by_row(grid_offset(value_grid), R).to(gl.float32)
        new_highest, new_lengths, new_zeros, decays, weights = (), (), (), (), ()
        for t in gl.static_range(TILES):
            most, decay = raised(gl.max(scores[t], 1), highest[t])
            p = exp2(scores[t] - most[:, None])
            pv = p * by_block(value_scale, BL)
            new_highest += (most,)
            new_lengths += (lengths[t] * decay + gl.sum(p, 1),)
            new_zeros += (zeros[t] * decay + gl.sum(pv * by_block(value_offset, BL), 1),)
            decays += (decay,)
            weights += (pv.to(gl.float16),)
        highest, lengths, zeros = new_highest, new_lengths, new_zeros
        if TILES == 1:
            both = gl.join(weights[0], gl.full_like(weights[0], 0.0))
            d = gl.join(decays[0], decays[0])
        else:
            both = gl.join(weights[0], weights[1])
            d = gl.join(decays[0], decays[1])
        both = transposed(gl.convert_layout(gl.reshape(both, [W, 8, 8, 8]), FR, assert_trivial=True))
        both = gl.convert_layout(gl.reshape(gl.permute(both, [0, 1, 3, 2]), [W, 64, 8]), PB, assert_trivial=True)
        d = gl.reshape(gl.reshape(d, [W, 1, 8, 8]).broadcast_to([W, ROWS // 8, 8, 8]), [W, ROWS, 8])
        d = gl.convert_layout(d, MMA, assert_trivial=True)
        old, acc = acc, ()
        for i in gl.static_range(FOURS):
            four = decayed((old[4 * i], old[4 * i + 1], old[4 * i + 2], old[4 * i + 3]), d)
            for j in gl.static_range(4):
                if D == 64:
                    planes = two_value_planes(value_words, 2 * (4 * i + j), VA)
                else:
                    planes = value_plane(value_words, 4 * i + j)
                acc += (mma_v2(planes, both, four[j]),)

    for t in gl.static_range(TILES):
        x = code_fragments(acc, t, SHAPE, WARPS)
        z = gl.sum(zeros[t], 1) * 0.125
        store_part(highest[t], lengths[t], z, x, t, True, stats, sums, SHAPE, WARPS)


@gluon.jit
def column_half(a, T: gl.constexpr):
    """[..., 8 columns] to [..., 4]: the even or the odd ones."""
    even, odd = gl.split(gl.reshape(a, [a.shape[0], a.shape[1] // 8, 8, 4, 2]))
    if T == 0:
        return even
    else:
        return odd


@gluon.jit
def code_fragments(acc, T: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Sums by plane, [warps, rows, 8], as [warps, head_dim / 32, 8 g, 4 heads, 4]: channel 16 f + 8 h + g lies at
    [f / 2, g, head, 2 (f % 2) + h], so that a lane's sums are as it has them, and its stores are of 16 bytes."""
    W: gl.constexpr = WARPS
    if SHAPE.head_dim == 64:
        x = gl.join(
            gl.join(column_half(acc[0], T), column_half(acc[2], T)),
            gl.join(column_half(acc[1], T), column_half(acc[3], T)),
        )
        x = gl.permute(x, [0, 4, 2, 3, 5, 1])
    else:
        x0 = gl.join(column_half(acc[0], T), column_half(acc[4], T))
        x1 = gl.join(column_half(acc[1], T), column_half(acc[5], T))
        x2 = gl.join(column_half(acc[2], T), column_half(acc[6], T))
        x3 = gl.join(column_half(acc[3], T), column_half(acc[7], T))
        x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
        if SHAPE.head_dim == 128:
            x = gl.permute(x, [0, 4, 5, 2, 3, 6, 1])
        else:
            x = gl.reshape(x, [W, 2, 2, 8, 4, 2, 2, 2])
            x = gl.permute(x, [0, 5, 6, 7, 3, 4, 1, 2])
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    return gl.convert_layout(gl.reshape(x, [W, HALVES, 8, 4, 4]), fragment_layout(W, HALVES), assert_trivial=True)


@gluon.jit
def store_part(
    highest,
    lengths,
    z,
    x,
    T: gl.constexpr,
    CODES: gl.constexpr,
    stats,
    sums,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Merge what the warps found and store it: maximum and length per head, and the sums in the order of fragments."""
    W: gl.constexpr = WARPS
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    RL: gl.constexpr = part_layout(W, HALVES, W)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, RL)))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    SMALL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [W, HALVES, 8, 4, 4], PLAIN)
    shared.store(x)
    m = gl.max(highest, 1)
    l = gl.sum(lengths, 1)
    shared_m = gl.allocate_shared_memory(gl.float32, [W, 4], SMALL, m)
    shared_l = gl.allocate_shared_memory(gl.float32, [W, 4], SMALL, l)
    shared_z = gl.allocate_shared_memory(gl.float32, [W, 4], SMALL, z)
    m, l, x = merged(shared_m.load(ML), shared_l.load(ML), shared.load(RL))
    if CODES:
        # Operands of a plane lack 2^24 of fp16's subnormals, less where their bits are.
        top = shared_m.load(ML)
        z = gl.sum(shared_z.load(ML) * exp2(top - m[None]), 0)
        f = gl.arange(
            0, HALVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(0, RL))))
        )[:, None, None, None]
        v = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(0, RL)))))[
            None, None, None, :
        ]
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(0, RL)))))[
            None, :, None, None
        ]
        channel = (2 * f + v // 2) * 16 + v % 2 * 8 + g
        factor = (127 + 24 - 2 * (channel // (SHAPE.head_dim // 8) % 5)) << 23
        x = x * float_of_bits(factor) + of_heads(z, x)
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, ML))
    gl.store(stats + 4 * T + j, m)
    gl.store(stats + 4 * (SHAPE.tiles + T) + j, l)
    gl.store(sums + T * (4 * SHAPE.head_dim) + part_index(HALVES, gl.SliceLayout(0, RL)), x)


@gluon.jit
def part_index(HALVES: gl.constexpr, L: gl.constexpr):
    f = gl.arange(0, HALVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    v = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    return f * 128 + g * 16 + j * 4 + v


@gluon.jit
def of_heads(x, like):
    """[4 heads] for sums [HALVES, 8, 4 heads, 4]."""
    L: gl.constexpr = like.type.layout
    M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    return gl.convert_layout(x, M, assert_trivial=True)[None, None, :, None]


@gluon.jit
def merged(m, l, x):
    """Parts, [parts, 4 heads] and [parts, HALVES, 8, 4 heads, 4], into one."""
    top = gl.max(m, 0)
    w = exp2(m - top[None])
    return top, gl.sum(l * w, 0), gl.sum(x * w[:, None, None, :, None], 0)


# --- windows -------------------------------------------------------------------------------------------------


@gluon.jit
def window_operand(q, head, SHAPE: gl.constexpr, WARPS: gl.constexpr, QB: gl.constexpr):
    """Of four heads, the query in two parts of bfloat16, in neighbouring columns."""
    L: gl.constexpr = gl.SliceLayout(0, QB)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    channel = gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(1, L))[:, None]
    h = (head + column // 2)[None, :]
    x = gl.load(q + h * SHAPE.head_dim + channel, mask=h < SHAPE.group, other=0.0).to(gl.float32)
    upper = x.to(gl.bfloat16)
    part = gl.where((column % 2 == 0)[None, :], upper, (x - upper.to(gl.float32)).to(gl.bfloat16))
    return part[None].broadcast_to([WARPS, SHAPE.head_dim, 8])


@gluon.jit
def attend_window(
    q, keys, values, first, end, length, head, scale, stats, sums, SHAPE: gl.constexpr, WARPS: gl.constexpr
):
    """16-bit window slots `first` to `end`; every warp takes 16 of them at a time."""
    TILES: gl.constexpr = SHAPE.tiles
    W: gl.constexpr = WARPS
    D: gl.constexpr = SHAPE.head_dim
    MMA: gl.constexpr = mma_layout(W)
    KA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    QB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    VA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SC: gl.constexpr = scores_layout(W, 16)
    BL: gl.constexpr = blocks_layout(W, 2)
    FR: gl.constexpr = fragments_layout(W, 2)
    L3: gl.constexpr = gl.SliceLayout(1, BL)
    operands, highest, lengths, acc = (), (), (), ()
    for t in gl.static_range(TILES):
        operands += (window_operand(q, head + 4 * t, SHAPE, WARPS, QB),)
        highest += (gl.full([W, 8, 4], _LOWEST, gl.float32, layout=L3),)
        lengths += (gl.full([W, 8, 4], 0.0, gl.float32, layout=L3),)
        acc += (gl.full([W, D, 8], 0.0, gl.float32, layout=MMA),)
    warp_k = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, KA)))[:, None, None] * 16
    warp_v = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, VA)))[:, None, None] * 16
    slot_k = warp_k + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, KA)))[None, :, None]
    slot_v = warp_v + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, VA)))[None, None, :]
    channel_k = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, KA)))[None, None, :]
    channel_v = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(2, VA)))[None, :, None]
    B1: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BL)))
    B2: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, BL)))
    B3: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BL)))
    slot = (
        gl.arange(0, W, layout=B1)[:, None, None] * 16
        + gl.arange(0, 2, layout=B2)[None, :, None] * 8
        + gl.arange(0, 8, layout=B3)[None, None, :]
    )
    for start in range(first, end, 16 * W):
        k = gl.load(keys + (start + slot_k) * D + channel_k, mask=start + slot_k < end, other=0.0)
        v = gl.load(values + (start + slot_v) * D + channel_v, mask=start + slot_v < end, other=0.0)
        seen = start + slot < end
        if SHAPE.sliding_window is not None:
            age = gl.where(
                start + slot < SHAPE.sinks,
                length - 1 - start - slot,
                (length - 1 - start - slot) % max(1, SHAPE.ring),
            )
            seen = seen & (age < SHAPE.sliding_window)
        new_highest, new_lengths, new_acc = (), (), ()
        for t in gl.static_range(TILES):
            s = mma_v2(k, operands[t], gl.full([W, 16, 8], 0.0, gl.float32, layout=MMA))
            upper, lower = gl.split(gl.reshape(s, [W, 16, 4, 2]))
            x = gl.convert_layout((upper + lower) * scale, SC, assert_trivial=True)
            x = gl.convert_layout(gl.reshape(x, [W, 2, 8, 4]), BL, assert_trivial=True)
            x = gl.where(seen[:, :, :, None], x, float("-inf"))
            most, decay = raised(gl.max(x, 1), highest[t])
            p = exp2(x - most[:, None])
            new_highest += (most,)
            new_lengths += (lengths[t] * decay + gl.sum(p, 1),)
            # Weights in two parts, as 8 bits of mantissa are too few for one that is nearly all of the sum.
            upper = p.to(gl.bfloat16)
            both = gl.join(upper, (p - upper.to(gl.float32)).to(gl.bfloat16))
            both = transposed(gl.convert_layout(gl.reshape(both, [W, 2, 8, 8]), FR, assert_trivial=True))
            both = gl.convert_layout(gl.reshape(gl.permute(both, [0, 1, 3, 2]), [W, 16, 8]), PB, assert_trivial=True)
            d = gl.reshape(gl.join(decay, decay), [W, 1, 8, 8]).broadcast_to([W, D // 8, 8, 8])
            d = gl.convert_layout(gl.reshape(d, [W, D, 8]), MMA, assert_trivial=True)
            new_acc += (mma_v2(v, both, acc[t] * d),)
        highest, lengths, acc = new_highest, new_lengths, new_acc
    HALVES: gl.constexpr = D // 32
    for t in gl.static_range(TILES):
        upper, lower = gl.split(gl.reshape(acc[t], [W, D // 16, 2, 8, 4, 2]))
        x = gl.reshape(upper + lower, [W, HALVES, 2, 2, 8, 4])
        x = gl.reshape(gl.permute(x, [0, 1, 4, 5, 2, 3]), [W, HALVES, 8, 4, 4])
        x = gl.convert_layout(x, fragment_layout(W, HALVES), assert_trivial=True)
        store_part(highest[t], lengths[t], gl.sum(lengths[t], 1), x, t, False, stats, sums, SHAPE, WARPS)


# --- the last program's part ---------------------------------------------------------------------------------


@gluon.jit
def add_parts(stats, sums, first, end, T: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """The parts `first` to `end`, added up in their order: maximum, length [4 heads], and sums [HALVES, 8, 4 heads, 4]."""
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    RL: gl.constexpr = part_layout(_PARTS_AT_ONCE, HALVES, WARPS)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, RL)))
    PL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, RL))))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, ML))[None]
    index = part_index(HALVES, gl.SliceLayout(0, RL))[None]
    top = gl.full([4], _LOWEST, gl.float32, layout=gl.SliceLayout(0, ML))
    length = gl.full([4], 0.0, gl.float32, layout=gl.SliceLayout(0, ML))
    total = gl.full([HALVES, 8, 4, 4], 0.0, gl.float32, layout=gl.SliceLayout(0, RL))
    for start in range(first, end, _PARTS_AT_ONCE):
        part = start + gl.arange(0, _PARTS_AT_ONCE, layout=PL)
        part_m = gl.convert_layout(part, gl.SliceLayout(1, ML), assert_trivial=True)[:, None]
        at = stats + part_m * (8 * SHAPE.tiles) + 4 * T + j
        m = gl.load(at, mask=part_m < end, other=_LOWEST, cache_modifier=".cg")
        l = gl.load(at + 4 * SHAPE.tiles, mask=part_m < end, other=0.0, cache_modifier=".cg")
        part_x = part[:, None, None, None, None]
        x = gl.load(
            sums + (part_x * SHAPE.tiles + T) * (4 * SHAPE.head_dim) + index,
            mask=part_x < end,
            other=0.0,
            cache_modifier=".cg",
        )
        m, l, x = merged(m, l, x)
        more = gl.maximum(top, m)
        old, new = exp2(top - more), exp2(m - more)
        top = more
        length = length * old + l * new
        total = total * of_heads(old, total) + x * of_heads(new, total)
    return top, length, total


@gluon.jit
def by_channel(x, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """[HALVES, 8, 4 heads, 4] in the order of fragments to [head_dim, 4 heads]."""
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    return gl.reshape(gl.permute(gl.reshape(x, [HALVES, 8, 4, 2, 2]), [0, 3, 4, 1, 2]), [SHAPE.head_dim, 4])


@gluon.jit
def reduce(
    stats,
    sums,
    head,
    first_part,
    end_part,
    output_matrix,
    matrix_scale,
    sink_logits,
    out,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    W: gl.constexpr = WARPS
    D: gl.constexpr = SHAPE.head_dim
    TILES: gl.constexpr = SHAPE.tiles
    HALVES: gl.constexpr = D // 32
    RL: gl.constexpr = gl.SliceLayout(0, part_layout(_PARTS_AT_ONCE, HALVES, W))
    HL: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, part_layout(_PARTS_AT_ONCE, HALVES, W))))
    )
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    if output_matrix is not None:
        ML: gl.constexpr = matrix_layout(D, W)
        k = gl.arange(
            0, D // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, ML))))
        )[:, None, None, None, None]
        c = gl.arange(
            0, D // 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, ML))))
        )[None, :, None, None, None]
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, ML)))))[
            None, None, :, None, None
        ]
        j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, ML)))))[
            None, None, None, :, None
        ]
        v = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ML)))))[
            None, None, None, None, :
        ]
        matrix = gl.load(output_matrix + k * (16 * D) + c * 256 + g * 32 + j * 8 + v)
        # [steps, tiles, g, j, k half, row half, k low] to [tiles, row half, g, steps, k half, j, k low]
        matrix = gl.permute(gl.reshape(matrix, [D // 16, D // 16, 8, 4, 2, 2, 2]), [1, 5, 2, 0, 4, 3, 6])
        matrix = gl.convert_layout(gl.reshape(matrix, [D, D]), A, assert_trivial=True)
    for t in gl.static_range(TILES):
        m0, l0, wide = add_parts(stats, sums, 0, 1, t, SHAPE, WARPS)
        m1, l1, coded = add_parts(stats, sums, first_part, end_part, t, SHAPE, WARPS)
        m = gl.maximum(m0, m1)
        h = head + 4 * t + gl.arange(0, 4, layout=m.type.layout)
        if sink_logits is not None:
            logit = gl.load(sink_logits + h, mask=h < SHAPE.group, other=0.0) * _LOG2_E
            m = gl.maximum(m, logit)
        w0, w1 = exp2(m0 - m), exp2(m1 - m)
        total = l0 * w0 + l1 * w1
        if sink_logits is not None:
            total += exp2(logit - m)
        w0, w1 = w0 / total, w1 / total
        wide = by_channel(wide * of_heads(w0, wide), SHAPE, WARPS)
        coded = by_channel(coded * of_heads(w1, coded), SHAPE, WARPS)
        if output_matrix is not None:
            upper = coded.to(gl.float16)
            both = gl.reshape(gl.join(upper, (coded - upper.to(gl.float32)).to(gl.float16)), [D, 8])
            both = mma_v2(matrix, gl.convert_layout(both, B), gl.full([D, 8], 0.0, gl.float32, layout=MMA))
            upper, lower = gl.split(gl.reshape(both, [D, 4, 2]))
            result = (upper + lower) * matrix_scale
            result += gl.convert_layout(wide, result.type.layout)
        else:
            result = wide + coded
        store_out(out, result, head + 4 * t, SHAPE, WARPS)


@gluon.jit
def store_out(out, result, head, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    L: gl.constexpr = result.type.layout
    h = head + gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    c = gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(1, L))[:, None]
    gl.store(out + h * SHAPE.head_dim + c, result.to(out.dtype.element_ty), mask=h < SHAPE.group)


@gluon.jit
def extent(context_len, row, splits, pages_per_split, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """What a sequence has to read, and in how many parts. The 16-bit windows belong to the first part and count as
    `window_units` pages there."""
    length = gl.load(context_len + row) + 1
    in_window = gl.minimum(length, SHAPE.sinks + SHAPE.ring)
    end_token = length - in_window
    first_token = 0
    if SHAPE.sliding_window is not None:
        first_token = gl.minimum(gl.maximum(length - SHAPE.sliding_window - SHAPE.sinks, 0), end_token)
    first_page = first_token // 64
    pages = gl.cdiv(end_token, 64) - first_page
    per_part = gl.maximum(gl.cdiv(pages + SHAPE.window_units, splits), pages_per_split)
    ahead = gl.minimum(SHAPE.window_units, per_part)
    parts = gl.maximum(gl.cdiv(pages + ahead, per_part), 1)
    return length, in_window, first_token, end_token, first_page, pages, per_part, ahead, parts


@gluon.jit(do_not_specialize=["pages_per_split"])
def decode_kernel(
    q,
    steps,
    numbers,
    pages,
    windows,
    context_len,
    block_table,
    window_slot,
    mean,
    within,
    rope_cos,
    rope_sin,
    output_matrix,
    matrix_scale,
    sink_logits,
    stats,
    sums,
    arrived,
    out,
    scale,
    page_stride,
    record_stride,
    window_stride,
    values_stride,
    window_head_stride,
    table_stride,
    pages_per_split,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    D: gl.constexpr = SHAPE.head_dim
    BLOCKS: gl.constexpr = (SHAPE.group + 7) // 8
    split, row = gl.program_id(0), gl.program_id(2)
    kv_head, head = gl.program_id(1) // BLOCKS, gl.program_id(1) % BLOCKS * 8
    num_kv_heads = gl.num_programs(1) // BLOCKS
    pair = row * num_kv_heads + kv_head
    first_query = pair.to(gl.int64) * SHAPE.group
    splits = gl.num_programs(0)
    block = gl.program_id(1) % BLOCKS
    part = (gl.program_id(1) + row * gl.num_programs(1)).to(gl.int64) * (splits + 1)
    stats += part * (8 * SHAPE.tiles)
    sums += part * (SHAPE.tiles * 4 * D)
    slot = gl.load(window_slot + row).to(gl.int64)
    length, in_window, first_token, end_token, first_page, pages_of, per_part, ahead, parts = extent(
        context_len, row, splits, pages_per_split, SHAPE, WARPS
    )
    works = False
    if slot >= 0:
        works = split < parts
        if split == 0:
            keys = windows + slot * window_stride + kv_head * window_head_stride
            attend_window(
                q + first_query * D,
                keys,
                keys + values_stride,
                0,
                in_window,
                length,
                head,
                scale,
                stats,
                sums,
                SHAPE,
                WARPS,
            )
        first = gl.maximum(split * per_part - ahead, 0)
        stop = gl.minimum((split + 1) * per_part - ahead, pages_of)
        if first < stop:
            end = gl.minimum(end_token, (first_page + stop) * 64)
            attend_codes(
                q + first_query * D,
                steps + (pair.to(gl.int64) * BLOCKS + block) * (SHAPE.tiles * 8 * D),
                numbers + (pair.to(gl.int64) * BLOCKS + block) * (SHAPE.tiles * 16),
                pages + kv_head.to(gl.int64) * record_stride,
                page_stride,
                block_table + row.to(gl.int64) * table_stride,
                first_page + first,
                first_page + stop,
                first_token,
                end,
                head,
                scale,
                mean + kv_head * D if SHAPE.removed_mean else mean,
                within,
                rope_cos,
                rope_sin,
                stats + (split + 1) * (8 * SHAPE.tiles),
                sums + (split + 1) * (SHAPE.tiles * 4 * D),
                SHAPE,
                WARPS,
            )
    elif split == 0:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        i = gl.arange(0, 8 * D, layout=L)
        gl.store(
            out + first_query * D + head * D + i,
            gl.zeros([8 * D], out.dtype.element_ty, layout=L),
            mask=i < (SHAPE.group - head) * D,
        )
    if works:
        _barrier()
        ticket = gl.program_id(1) + row * gl.num_programs(1)
        if gl.atomic_add(arrived + ticket, 1, sem="acq_rel") == parts - 1:
            matrix = output_matrix
            factor = 1.0
            if output_matrix is not None:
                matrix = output_matrix + kv_head * (D * D)
                factor = gl.load(matrix_scale + kv_head)
            logits = sink_logits
            if sink_logits is not None:
                logits = sink_logits + kv_head * SHAPE.group
            first_part = gl.where((pages_of > 0) & (per_part > ahead), 1, 2)
            reduce(
                stats, sums, head, first_part, parts + 1, matrix, factor, logits, out + first_query * D, SHAPE, WARPS
            )
            gl.store(arrived + ticket, 0)
