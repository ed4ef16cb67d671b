"""Layouts of the Gluon decode kernel: which lane and register of a warp hold which element.

All tensors of its loop have a leading axis of warps: each warp works on a page of its own. Lane l of a warp is lane
(r, j) = (l // 4, l % 4) of the tensor core's fragments. Where a layout is that of an operand or result under another
shape, going over to it moves nothing between lanes, and `convert_layout(..., assert_trivial=True)` holds the compiler
to it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def warp_bases(warps, rank):
    """Of a layout whose first axis is that of the warps."""
    return [[1 << i] + [0] * (rank - 1) for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def linear(regs, lanes, shape):
    """Registers and lanes as given, warps along the first axis."""
    return gl.DistributedLinearLayout(
        reg_bases=regs, lane_bases=lanes, warp_bases=warp_bases(shape[0], len(shape)), block_bases=[], shape=shape
    )


@gluon.constexpr_function
def mma_layout(warps):
    """[warps, 16 rows, 8 columns] and multiples: a product of its own for every warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def scores_layout(warps, rows):
    """[warps, rows, 4 heads]: rows lane / 4 + 8 register, head lane % 4."""
    regs = [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    return linear(regs, [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [warps, rows, 4])


@gluon.constexpr_function
def blocks_layout(warps, blocks):
    """[warps, blocks, 8 rows, 4 heads], as `scores_layout`."""
    regs = [[0, 1 << i, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return linear(regs, lanes, [warps, blocks, 8, 4])


@gluon.constexpr_function
def fragments_layout(warps, blocks):
    """[warps, blocks, 8 rows, 8 columns]: each block an 8 x 8 fragment, two columns in one register."""
    regs = [[0, 0, 0, 1]] + [[0, 1 << i, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return linear(regs, lanes, [warps, blocks, 8, 8])


@gluon.constexpr_function
def grids_layout(warps):
    """[warps, 8, 8]: token 8 r + x, r = lane / 4, x = register."""
    return linear(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [warps, 8, 8]
    )


@gluon.constexpr_function
def keys_layout(warps, size):
    """[warps, 8, 8 rows, bytes of a token]: row 8 x + r, r = lane / 4, as the operand of int8 has it."""
    own = 4 if size == 16 else 8
    regs = [[0, 0, 0, 1 << i] for i in range(own.bit_length() - 1)] + [[0, 0, 0, 32]] * (size == 64)
    regs += [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return linear(
        regs, [[0, 0, 0, own], [0, 0, 0, 2 * own], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]], [warps, 8, 8, size]
    )


@gluon.constexpr_function
def half_values_layout(warps):
    """[warps, 8 words, 64 slots]: half of an operand, whose other half is another plane of the same words."""
    regs = [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return linear(regs, [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [warps, 8, 64])


@gluon.constexpr_function
def wide_values_layout(warps, head_dim):
    """[warps, 16 slots, head_dim]: eight neighbouring channels 8 r + i of the slots that an operand has there."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 8, 0]]
    regs += [[0, 0, 64 << i] for i in range((head_dim // 64).bit_length() - 1)]
    return linear(regs, [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]], [warps, 16, head_dim])


@gluon.constexpr_function
def fragment_layout(warps, halves):
    """[warps, halves, 8 g, 4 heads, 4]: g = lane / 4, head = lane % 4, the rest in registers."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]] + [[0, 1 << i, 0, 0, 0] for i in range(halves.bit_length() - 1)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    return linear(regs, lanes, [warps, halves, 8, 4, 4])


@gluon.constexpr_function
def parts_layout(each, halves, warps):
    """[each * warps parts, halves, 8 g, 4 heads, 4], as `fragment_layout`: every warp has parts of its own."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]] + [[0, 1 << i, 0, 0, 0] for i in range(halves.bit_length() - 1)]
    regs += [[warps << i, 0, 0, 0, 0] for i in range(each.bit_length() - 1)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=lanes,
        warp_bases=warp_bases(warps, 5),
        block_bases=[],
        shape=[each * warps, halves, 8, 4, 4],
    )


@gluon.constexpr_function
def merged_layout(halves, warps):
    """[warps, halves, 8, 4, 4] with the warps' results in registers, and their elements over all threads."""
    bases = [
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 2],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 2, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 2, 0, 0],
        [0, 0, 4, 0, 0],
    ]
    bases += [[0, 1 << i, 0, 0, 0] for i in range(halves.bit_length() - 1)]
    threads = 5 + warps.bit_length() - 1
    own = max(0, len(bases) - threads)
    spread = bases[own:] + [[0, 0, 0, 0, 0]] * (threads - len(bases) + own)
    return gl.DistributedLinearLayout(
        reg_bases=bases[:own] + warp_bases(warps, 5),
        lane_bases=spread[:5],
        warp_bases=spread[5:],
        block_bases=[],
        shape=[warps, halves, 8, 4, 4],
    )


@gluon.constexpr_function
def matrix_layout(n, warps):
    """[n / 16 steps, n / 16 tiles, 8 g, 4 j, 8]: operands of m16n8k16 as they lie in memory."""
    count = (n // 16).bit_length() - 1
    bits = warps.bit_length() - 1
    tiles = [[0, 1 << i, 0, 0, 0] for i in range(count)]
    regs = (
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4]]
        + tiles[bits:]
        + [[1 << i, 0, 0, 0, 0] for i in range(count)]
    )
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    warp = tiles[:bits] + [[0, 0, 0, 0, 0]] * max(0, bits - count)
    return gl.DistributedLinearLayout(
        reg_bases=regs, lane_bases=lanes, warp_bases=warp, block_bases=[], shape=[n // 16, n // 16, 8, 4, 8]
    )


@gluon.constexpr_function
def rotations_layout(warps):
    """[4 tiles, 8 r, 4 j, 8]: an operand of [64 tokens, 16] as it lies in memory; all warps hold it."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=lanes,
        warp_bases=[[0] * 4] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[4, 8, 4, 8],
    )


@gluon.constexpr_function
def turns_layout(warps):
    """[warps, 8 pairs, 8 columns, 2]: pairs 2 j and 2 j + 1 and column r, as half an operand of [16, 8] has them, and
    two numbers of each."""
    lanes = [[0, 2, 0, 0], [0, 4, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return linear([[0, 0, 0, 1], [0, 1, 0, 0]], lanes, [warps, 8, 8, 2])


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """Of a vector that becomes one axis of tensors in `layout` by adding the others, the first one first."""
    for other in reversed([other for other in range(rank) if other != axis]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def axis(SIZE: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. SIZE - 1 along one axis of tensors in a layout, and size 1 along all others."""
    x = gl.arange(0, SIZE, layout=axis_layout(LAYOUT, RANK, AXIS))
    for other in gl.static_range(RANK):
        if other != AXIS:
            x = gl.expand_dims(x, other)
    return x
