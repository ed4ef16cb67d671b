"""Partial results of the Gluon decode kernel: merged over the warps of a program, and over programs by the last one.

A program leaves one part of the windows' tokens, one of coded tokens, or both. A part is a running maximum and a sum
of weights per head, and weighted sums of values in the order of the tensor core's fragments, [head_dim / 32, 8 r,
4 heads, 4]: row 16 f + 8 h + r of the product lies at [f / 2, r, head, 2 (f % 2) + h]. A lane's sums are neighbours
then, and all parts are merged element by element, whatever the order means.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from subten.kernels.attention.gluon_layouts import axis, fragment_layout, matrix_layout, merged_layout, parts_layout
from subten.kernels.attention.gluon_ptx import exp2, float_of_bits

LOWEST = gl.constexpr(-1e30)
"""Start of a running maximum: finite, so that a warp which has seen no key yet does not become NaN."""
_LOG2_E = gl.constexpr(math.log2(math.e))


# --- of one program --------------------------------------------------------------------------------------------


@gluon.jit
def code_fragments(acc, TILE: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Sums over coded values by plane, [warps, rows, 8] each, as fragments of one tile of heads."""
    if SHAPE.head_dim == 64:
        even = gl.join(_columns(acc[0], TILE), _columns(acc[2], TILE))
        odd = gl.join(_columns(acc[1], TILE), _columns(acc[3], TILE))
        x = gl.permute(gl.join(even, odd), [0, 4, 2, 3, 5, 1])
    else:
        x0 = gl.join(_columns(acc[0], TILE), _columns(acc[4], TILE))
        x1 = gl.join(_columns(acc[1], TILE), _columns(acc[5], TILE))
        x2 = gl.join(_columns(acc[2], TILE), _columns(acc[6], TILE))
        x3 = gl.join(_columns(acc[3], TILE), _columns(acc[7], TILE))
        x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
        if SHAPE.head_dim == 128:
            x = gl.permute(x, [0, 4, 5, 2, 3, 6, 1])
        else:
            x = gl.reshape(x, [WARPS, 2, 2, 8, 4, 2, 2, 2])
            x = gl.permute(x, [0, 5, 6, 7, 3, 4, 1, 2])
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    x = gl.reshape(x, [WARPS, HALVES, 8, 4, 4])
    return gl.convert_layout(x, fragment_layout(WARPS, HALVES), assert_trivial=True)


@gluon.jit
def _columns(a, TILE: gl.constexpr):
    """Of [warps, rows, 8] the even columns (the first tile's heads) or the odd ones: [warps, rows / 8, 8, 4]."""
    even, odd = gl.split(gl.reshape(a, [a.shape[0], a.shape[1] // 8, 8, 4, 2]))
    if TILE == 0:
        return even
    else:
        return odd


@gluon.jit
def wide_fragments(acc, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Sums over 16-bit values, [warps, head_dim, 8], of which a head's two columns belong together, as fragments."""
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    upper, lower = gl.split(gl.reshape(acc, [WARPS, SHAPE.head_dim // 16, 2, 8, 4, 2]))
    x = gl.permute(gl.reshape(upper + lower, [WARPS, HALVES, 2, 2, 8, 4]), [0, 1, 4, 5, 2, 3])
    x = gl.reshape(x, [WARPS, HALVES, 8, 4, 4])
    return gl.convert_layout(x, fragment_layout(WARPS, HALVES), assert_trivial=True)


@gluon.jit
def store_part(
    highest,
    lengths,
    offsets,
    x,
    TILE: gl.constexpr,
    CODES: gl.constexpr,
    stats,
    sums,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Merge what the warps found, and store it as a part.

    Args:
        highest: [warps, 8, 4 heads], running maxima.
        lengths: [warps, 8, 4 heads], each lane's sums of weights.
        offsets: [warps, 4 heads], what grids' offsets add to every channel, if x are sums of codes.
        x: [warps, head_dim / 32, 8, 4 heads, 4].
    """
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    RL: gl.constexpr = merged_layout(HALVES, WARPS)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, RL)))
    maximum, length, offset, x = _over_warps(gl.max(highest, 1), gl.sum(lengths, 1), offsets, x)
    if CODES:
        L: gl.constexpr = gl.SliceLayout(0, RL)
        f, v, r = axis(HALVES, 0, 4, L), axis(4, 3, 4, L), axis(8, 1, 4, L)
        channel = (2 * f + v // 2) * 16 + v % 2 * 8 + r
        # What `value_plane` left out.
        factor = (127 + 24 - 2 * (channel // (SHAPE.head_dim // 8) % 5)) << 23
        x = x * float_of_bits(factor) + _of_heads(offset, x)
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, ML))
    gl.store(stats + 4 * TILE + j, maximum)
    gl.store(stats + 4 * (SHAPE.tiles + TILE) + j, length)
    gl.store(sums + TILE * (4 * SHAPE.head_dim) + _place(HALVES, gl.SliceLayout(0, RL)), x)


@gluon.jit
def _over_warps(maxima, lengths, offsets, x):
    """What the warps found, [warps, 4 heads] thrice and [warps, HALVES, 8, 4 heads, 4], merged: by all threads."""
    WARPS: gl.constexpr = x.shape[0]
    RL: gl.constexpr = merged_layout(x.shape[1], WARPS)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, RL)))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    SMALL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # All are stored before the first is loaded: one barrier.
    shared = gl.allocate_shared_memory(gl.float32, x.shape, PLAIN, x)
    shared_m = gl.allocate_shared_memory(gl.float32, [WARPS, 4], SMALL, maxima)
    shared_l = gl.allocate_shared_memory(gl.float32, [WARPS, 4], SMALL, lengths)
    shared_o = gl.allocate_shared_memory(gl.float32, [WARPS, 4], SMALL, offsets)
    maxima = shared_m.load(ML)
    maximum = gl.max(maxima, 0)
    share = exp2(maxima - maximum[None])
    length = gl.sum(shared_l.load(ML) * share, 0)
    offset = gl.sum(shared_o.load(ML) * share, 0)
    return maximum, length, offset, gl.sum(shared.load(RL) * share[:, None, None, :, None], 0)


@gluon.jit
def _place(HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the elements of a part [HALVES, 8, 4, 4], in memory."""
    f, r = axis(HALVES, 0, 4, LAYOUT), axis(8, 1, 4, LAYOUT)
    return f * 128 + r * 16 + axis(4, 2, 4, LAYOUT) * 4 + axis(4, 3, 4, LAYOUT)


@gluon.jit
def _of_heads(x, like):
    """[4 heads] as a factor or summand of fragments `like` [HALVES, 8, 4 heads, 4]."""
    M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout)))
    return gl.convert_layout(x, M, assert_trivial=True)[None, None, :, None]


# --- of all programs -------------------------------------------------------------------------------------------


@gluon.jit
def _load_parts(
    stats, sums, first, end, TILE: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr
):
    """The parts `first` to `end` of one tile of heads, as many as EACH per warp: maxima, lengths, sums."""
    HALVES: gl.constexpr = SHAPE.head_dim // 32
    COUNT: gl.constexpr = EACH * WARPS
    PL: gl.constexpr = parts_layout(EACH, HALVES, WARPS)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, PL)))
    part = first + axis(COUNT, 0, 5, PL)
    of_stats = first + axis(COUNT, 0, 2, ML)
    at = stats + of_stats * (8 * SHAPE.tiles) + 4 * TILE + axis(4, 1, 2, ML)
    maxima = gl.load(at, mask=of_stats < end, other=LOWEST, cache_modifier=".cg")
    lengths = gl.load(at + 4 * SHAPE.tiles, mask=of_stats < end, other=0.0, cache_modifier=".cg")
    at = sums + (part * SHAPE.tiles + TILE) * (4 * SHAPE.head_dim) + _place(HALVES, gl.SliceLayout(0, PL))[None]
    return maxima, lengths, gl.load(at, mask=part < end, other=0.0, cache_modifier=".cg")


@gluon.jit
def _fold(maxima, lengths, x, WARPS: gl.constexpr):
    """The parts of each warp into one, in its registers: [warps, 4 heads] twice, [warps, HALVES, 8, 4 heads, 4]."""
    EACH: gl.constexpr = x.shape[0] // WARPS
    HALVES: gl.constexpr = x.shape[1]
    FL: gl.constexpr = fragment_layout(WARPS, HALVES)
    ML: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, FL)))
    maxima, lengths = gl.reshape(maxima, [EACH, WARPS, 4]), gl.reshape(lengths, [EACH, WARPS, 4])
    maximum = gl.max(maxima, 0)
    share = exp2(maxima - maximum[None])
    length = gl.convert_layout(gl.sum(lengths * share, 0), ML, assert_trivial=True)
    x = gl.reshape(x, [EACH, WARPS, HALVES, 8, 4, 4])
    of_heads: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(5, x.type.layout)))
    share = gl.convert_layout(share, of_heads, assert_trivial=True)[:, :, None, None, :, None]
    total = gl.convert_layout(gl.sum(x * share, 0), FL, assert_trivial=True)
    return gl.convert_layout(maximum, ML, assert_trivial=True), length, total


@gluon.jit
def _add_parts(
    maxima, lengths, x, stats, sums, first, end, TILE: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr
):
    """Parts that are loaded already, and those `first` to `end`, added up in an order that is always the same."""
    EACH: gl.constexpr = x.shape[0] // WARPS
    maximum, length, total = _fold(maxima, lengths, x, WARPS)
    for start in range(first, end, EACH * WARPS):
        later = _load_parts(stats, sums, start, end, TILE, SHAPE, WARPS, EACH)
        new_maximum, new_length, new = _fold(later[0], later[1], later[2], WARPS)
        higher = gl.maximum(maximum, new_maximum)
        old_share, new_share = exp2(maximum - higher), exp2(new_maximum - higher)
        maximum = higher
        length = length * old_share + new_length * new_share
        total = total * old_share[:, None, None, :, None] + new * new_share[:, None, None, :, None]
    maximum, length, _, total = _over_warps(maximum, length, length, total)
    return maximum, length, total


@gluon.jit
def _by_channel(x, SHAPE: gl.constexpr):
    """Fragments [HALVES, 8, 4 heads, 4] as [head_dim, 4 heads]."""
    x = gl.permute(gl.reshape(x, [SHAPE.head_dim // 32, 8, 4, 2, 2]), [0, 3, 4, 1, 2])
    return gl.reshape(x, [SHAPE.head_dim, 4])


@gluon.jit
def _by_wide_channel(x, SHAPE: gl.constexpr):
    """As `_by_channel`, where rows of the tensor core's product were channels 64 h + 8 r + i in the order h, i, r."""
    x = gl.reshape(_by_channel(x, SHAPE), [SHAPE.head_dim // 64, 8, 8, 4])
    return gl.reshape(gl.permute(x, [0, 2, 1, 3]), [SHAPE.head_dim, 4])


@gluon.jit
def _operand_of(matrix, MMA: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """The output matrix, as it lies in memory in the order of operands, to one [head_dim, head_dim]."""
    D: gl.constexpr = SHAPE.head_dim
    L: gl.constexpr = matrix_layout(D, WARPS)
    at = matrix + axis(D // 16, 0, 5, L) * (16 * D) + axis(D // 16, 1, 5, L) * 256
    at += axis(8, 2, 5, L) * 32 + axis(4, 3, 5, L) * 8 + axis(8, 4, 5, L)
    # step, tile, r, j, k half, row half, k low -> tile, row half, r, step, k half, j, k low
    x = gl.reshape(gl.load(at), [D // 16, D // 16, 8, 4, 2, 2, 2])
    x = gl.reshape(gl.permute(x, [1, 5, 2, 0, 4, 3, 6]), [D, D])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def reduce_parts(
    stats,
    sums,
    head,
    window_parts,
    first_part,
    end_part,
    output_matrix,
    output_scale,
    sink_logits,
    out,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Parts 0 to `window_parts`, of the windows, and `first_part` to `end_part`, of codes, to the output. On the way
    sums over codes leave the values' coded space, on the tensor core in two parts of fp16 in neighbouring columns.
    """
    D: gl.constexpr = SHAPE.head_dim
    TILES: gl.constexpr = SHAPE.tiles
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    for t in gl.static_range(TILES):
        # As many as mostly are all are on their way before the first is used.
        wide = _load_parts(stats, sums, 0, window_parts, t, SHAPE, WARPS, 1)
        coded = _load_parts(stats, sums, first_part, end_part, t, SHAPE, WARPS, PARTS)
        wide_maximum, wide_length, wide = _add_parts(
            wide[0], wide[1], wide[2], stats, sums, WARPS, window_parts, t, SHAPE, WARPS
        )
        code_maximum, code_length, coded = _add_parts(
            coded[0], coded[1], coded[2], stats, sums, first_part + PARTS * WARPS, end_part, t, SHAPE, WARPS
        )
        if output_matrix is not None:
            matrix = _operand_of(output_matrix, MMA, SHAPE, WARPS)
        maximum = gl.maximum(wide_maximum, code_maximum)
        if sink_logits is not None:
            h = head + 4 * t + gl.arange(0, 4, layout=maximum.type.layout)
            sink = gl.load(sink_logits + h, mask=h < SHAPE.group, other=0.0) * _LOG2_E
            maximum = gl.maximum(maximum, sink)
        wide_share, code_share = exp2(wide_maximum - maximum), exp2(code_maximum - maximum)
        length = wide_length * wide_share + code_length * code_share
        if sink_logits is not None:
            length += exp2(sink - maximum)
        wide = _by_wide_channel(wide * _of_heads(wide_share / length, wide), SHAPE)
        coded = _by_channel(coded * _of_heads(code_share / length, coded), SHAPE)
        if output_matrix is not None:
            upper = coded.to(gl.float16)
            both = gl.reshape(gl.join(upper, (coded - upper.to(gl.float32)).to(gl.float16)), [D, 8])
            both = gl.convert_layout(both, gl.DotOperandLayout(1, MMA, 2))
            both = mma_v2(matrix, both, gl.full([D, 8], 0.0, gl.float32, layout=MMA))
            upper, lower = gl.split(gl.reshape(both, [D, 4, 2]))
            result = (upper + lower) * output_scale
            result += gl.convert_layout(wide, result.type.layout)
        else:
            result = coded + gl.convert_layout(wide, coded.type.layout)
        _store_out(out, result, head + 4 * t, SHAPE)


@gluon.jit
def _store_out(out, result, head, SHAPE: gl.constexpr):
    L: gl.constexpr = result.type.layout
    h = head + axis(4, 1, 2, L)
    place = out + h * SHAPE.head_dim + axis(SHAPE.head_dim, 0, 2, L)
    gl.store(place, result.to(out.dtype.element_ty), mask=h < SHAPE.group)
