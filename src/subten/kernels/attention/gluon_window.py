"""The 16-bit windows in the Gluon decode kernel: sinks and recent tokens, a few percent of what is read."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from subten.kernels.attention.gluon_layouts import (
    axis,
    axis_layout,
    blocks_layout,
    fragments_layout,
    grids_layout,
    mma_layout,
    scores_layout,
    wide_values_layout,
)
from subten.kernels.attention.gluon_parts import LOWEST, store_part, wide_fragments
from subten.kernels.attention.gluon_ptx import exp2, prefetch, raised, transposed


@gluon.jit
def _query_operand(q, head, SHAPE: gl.constexpr, WARPS: gl.constexpr, QB: gl.constexpr):
    """Of four heads, the query in two parts of bfloat16, in neighbouring columns: [warps, head_dim, 8]."""
    L: gl.constexpr = gl.SliceLayout(0, QB)
    column = axis(8, 1, 2, L)
    h = head + column // 2
    x = gl.load(q + h * SHAPE.head_dim + axis(SHAPE.head_dim, 0, 2, L), mask=h < SHAPE.group, other=0.0).to(
        gl.float32
    )
    upper = x.to(gl.bfloat16)
    part = gl.where(column % 2 == 0, upper, (x - upper.to(gl.float32)).to(gl.bfloat16))
    return part[None].broadcast_to([WARPS, SHAPE.head_dim, 8])


@gluon.jit
def ask_for_window(keys, values, begin, end, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Have the first slots from `begin` to `end`, 16 for each warp, brought into the L2 cache."""
    if end >= 16:
        warp = gl.arange(0, WARPS, layout=axis_layout(grids_layout(WARPS), 3, 0))
        slot = gl.minimum(begin + 16 * warp, end - 16)
        prefetch(keys + slot * SHAPE.head_dim, 32 * SHAPE.head_dim)
        prefetch(values + slot * SHAPE.head_dim, 32 * SHAPE.head_dim)


@gluon.jit
def attend_window(
    q, keys, values, begin, end, length, head, scale, stats, sums, SHAPE: gl.constexpr, WARPS: gl.constexpr
):
    """Window slots `begin` to `end`, all of which hold a token, of a sequence of `length` tokens. Every warp takes 16
    slots at a time."""
    TILES: gl.constexpr = SHAPE.tiles
    D: gl.constexpr = SHAPE.head_dim
    MMA: gl.constexpr = mma_layout(WARPS)
    KA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    QB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    VA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    VL: gl.constexpr = wide_values_layout(WARPS, D)
    PB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SC: gl.constexpr = scores_layout(WARPS, 16)
    BL: gl.constexpr = blocks_layout(WARPS, 2)
    L3: gl.constexpr = gl.SliceLayout(1, BL)
    operands, highest, lengths, acc = (), (), (), ()
    for t in gl.static_range(TILES):
        operands += (_query_operand(q, head + 4 * t, SHAPE, WARPS, QB),)
        highest += (gl.full([WARPS, 8, 4], LOWEST, gl.float32, layout=L3),)
        lengths += (gl.full([WARPS, 8, 4], 0.0, gl.float32, layout=L3),)
        acc += (gl.full([WARPS, D, 8], 0.0, gl.float32, layout=MMA),)
    key_slot = axis(WARPS, 0, 3, KA) * 16 + axis(16, 1, 3, KA)
    value_slot = axis(WARPS, 0, 3, VL) * 16 + axis(16, 1, 3, VL)
    key_channel, value_channel = axis(D, 2, 3, KA), axis(D, 2, 3, VL)
    L: gl.constexpr = gl.SliceLayout(3, BL)
    slot = axis(WARPS, 0, 3, L) * 16 + axis(2, 1, 3, L) * 8 + axis(8, 2, 3, L)
    for start in range(begin, end, 16 * WARPS):
        k = gl.load(keys + (start + key_slot) * D + key_channel, mask=start + key_slot < end, other=0.0)
        v = gl.load(values + (start + value_slot) * D + value_channel, mask=start + value_slot < end, other=0.0)
        # Rows of the product are channels 64 h + 8 r + i in the order h, i, r.
        v = gl.permute(gl.reshape(v, [WARPS, 16, D // 64, 8, 8]), [0, 2, 4, 3, 1])
        v = gl.convert_layout(gl.reshape(v, [WARPS, D, 16]), VA, assert_trivial=True)
        seen = start + slot < end
        if SHAPE.sliding_window is not None:
            # The ring's slots hold the latest tokens: a slot's position is the last one that falls on it.
            age = length - 1 - start - slot
            age = gl.where(start + slot < SHAPE.sinks, age, age % max(1, SHAPE.ring))
            seen = seen & (age < SHAPE.sliding_window)
        old_highest, old_lengths, old_acc = highest, lengths, acc
        highest, lengths, acc = (), (), ()
        for t in gl.static_range(TILES):
            s = mma_v2(k, operands[t], gl.full([WARPS, 16, 8], 0.0, gl.float32, layout=MMA))
            upper, lower = gl.split(gl.reshape(s, [WARPS, 16, 4, 2]))
            x = gl.convert_layout((upper + lower) * scale, SC, assert_trivial=True)
            x = gl.convert_layout(gl.reshape(x, [WARPS, 2, 8, 4]), BL, assert_trivial=True)
            x = gl.where(seen[:, :, :, None], x, float("-inf"))
            most, decay = raised(gl.max(x, 1), old_highest[t])
            p = exp2(x - most[:, None])
            highest += (most,)
            lengths += (old_lengths[t] * decay + gl.sum(p, 1),)
            # Weights in two parts, as 8 bits of mantissa are too few for one that is nearly all of the sum.
            upper = p.to(gl.bfloat16)
            both = gl.join(upper, (p - upper.to(gl.float32)).to(gl.bfloat16))
            both = gl.convert_layout(
                gl.reshape(both, [WARPS, 2, 8, 8]), fragments_layout(WARPS, 2), assert_trivial=True
            )
            both = gl.reshape(gl.permute(transposed(both), [0, 1, 3, 2]), [WARPS, 16, 8])
            both = gl.convert_layout(both, PB, assert_trivial=True)
            d = gl.reshape(gl.join(decay, decay), [WARPS, 1, 8, 8]).broadcast_to([WARPS, D // 8, 8, 8])
            d = gl.convert_layout(gl.reshape(d, [WARPS, D, 8]), MMA, assert_trivial=True)
            acc += (mma_v2(v, both, old_acc[t] * d),)
    for t in gl.static_range(TILES):
        x = wide_fragments(acc[t], SHAPE, WARPS)
        store_part(highest[t], lengths[t], gl.sum(lengths[t], 1), x, t, False, stats, sums, SHAPE, WARPS)
