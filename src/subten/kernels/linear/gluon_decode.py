"""A linear layer for 1 to 64 tokens on sm_90, in Gluon: Triton with layouts by hand.

The work is that of triton_decode.py, which serves other GPUs and is the one to read first. What differs:

- Weights reach a program through the copy engine, and are asked for before anything else: they are no result of the
  kernel before, which may still be running then. Of most layers all rows of a program are on their way at once.
- Tokens come the same way as soon as they are there. One or two are loaded by the threads that multiply them, which
  is quicker by half a microsecond, and for eight slower by as much.

docs/kernels/linear.md has the reasons and the measurements.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from subten.kernels.gluon_names import copy
from subten.kernels.gluon_overlap import let_next_kernel_start, wait_for_previous_kernel
from subten.kernels.linear import triton_decode
from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.plan import LinearTuning

_UNIT = gl.constexpr(2.0**-4)
"""See triton_decode.py."""
_CHUNK = gl.constexpr(256)
"""Elements of each token that a program leaves for others: 16 bytes of a thread."""


def linear_decode(
    x: Tensor,
    weights: LinearWeights,
    out: Tensor,
    tuning: LinearTuning,
    *,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """See `subten.kernels.linear.triton_decode.linear_decode`; what it takes is said by `plan.gluon_refusal`."""
    arguments = linear_arguments(x, weights, out, tuning, norm, normed, residual, factor)
    outputs, inputs = weights.weight.shape
    programs = triton.cdiv(outputs, tuning.rows)
    if normed is not None:
        # Those behind the last output have no weights to read, and leave their part of the tokens.
        programs = max(programs, inputs // _CHUNK.value)
    grid = triton.cdiv(len(x), tuning.columns), programs
    linear_kernel[grid](**arguments, num_warps=tuning.lanes, launch_pdl=True)
    return out


def linear_arguments(
    x: Tensor,
    weights: LinearWeights,
    out: Tensor,
    tuning: LinearTuning,
    norm: NormWeights | None,
    normed: Tensor | None,
    residual: Tensor | None,
    factor: float,
) -> dict[str, Any]:
    """All arguments of `linear_kernel`: the Triton kernel's, with weights as tiles to be copied."""
    arguments = triton_decode.linear_arguments(x, weights, out, tuning, norm, normed, residual, factor)
    return {
        **arguments,
        "x_tiles": _tiles(x, tuning.columns, tuning) if tuning.copied else None,
        "weight": _tiles(weights.weight, tuning.rows, tuning),
    }


def _tiles(matrix: Tensor, rows: int, tuning: LinearTuning) -> TensorDescriptor:
    """[columns / step, rows, step] of a matrix [rows, columns]: a tile is some rows of as many such blocks of columns
    as there are lanes, and zero where there is no row."""
    # The copy engine knows no FP8.
    plain = matrix.view(torch.uint8) if matrix.itemsize == 1 else matrix
    blocks = plain.unflatten(1, (-1, tuning.step)).transpose(0, 1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.itemsize, rank=3)
    return TensorDescriptor.from_tensor(blocks, [tuning.lanes, rows, tuning.step], layout)


@gluon.constexpr_function
def token_layout(warps):
    """[tokens, `_CHUNK`]: every token belongs to one warp."""
    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _request(tiles, ring, bars, step, row, TUNING: gl.constexpr):
    """Ask for the tile of a step."""
    place = step % TUNING.stages
    mbarrier.expect(bars.index(place), tiles.block_type.nbytes)
    copy(tiles, [step * TUNING.lanes, row, 0], bars.index(place), ring.index(place))


@gluon.jit
def _squares(values):
    """Of a step's tokens [lanes, step, columns], added up over the step."""
    wide = values.to(gl.float32)
    return gl.sum(wide * wide, 1)


@gluon.jit
def _tokens(elements, real, step, SPAN: gl.constexpr):
    """Of a step, [lanes, step, columns]."""
    return gl.load(elements + step * SPAN, mask=real[None, None, :], other=0.0)


@gluon.jit
def _factors(norm, k, step, SPAN: gl.constexpr):
    """The norm's weight for a step, [lanes, step], or none."""
    if norm is None:
        return ()
    else:
        return (gl.load(norm + step * SPAN + k),)


@gluon.jit
def _operand(values, factors, OPERAND: gl.constexpr, UNIT: gl.constexpr):
    """Tokens of a step as the tensor core takes them."""
    if len(factors) == 1:
        values *= (factors[0].to(values.dtype) * UNIT)[:, :, None]
    elif UNIT != 1:
        values *= UNIT
    return values.to(OPERAND)


@gluon.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, x_tiles, weight, scale, bias, norm, normed, residual, out, tokens, x_stride, residual_stride, eps, factor,
    SHAPE: gl.constexpr, TUNING: gl.constexpr,
):  # fmt: skip
    """Grid: blocks of `columns` tokens, and of `rows` output channels; with `normed` also of `_CHUNK` inputs."""
    LANES: gl.constexpr = TUNING.lanes
    ROWS: gl.constexpr = TUNING.rows
    COLUMNS: gl.constexpr = TUNING.columns
    STEP: gl.constexpr = TUNING.step
    STAGES: gl.constexpr = TUNING.stages
    INPUTS: gl.constexpr = SHAPE.inputs
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SPAN: gl.constexpr = LANES * STEP
    STEPS: gl.constexpr = INPUTS // SPAN
    SCALED: gl.constexpr = scale is not None
    OPERAND: gl.constexpr = gl.float16 if SCALED else weight.dtype
    # Weights in FP8 are multiplied as fp16, in which tokens of a million are finite after this factor.
    UNIT: gl.constexpr = _UNIT if SCALED else 1.0
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[LANES, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4 // SHAPE.itemsize)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 4 // SHAPE.itemsize)
    BY_TOKEN: gl.constexpr = token_layout(LANES)
    RESULT: gl.constexpr = gl.SliceLayout(0, ACC)

    ring = gl.allocate_shared_memory(weight.dtype, [STAGES, LANES, ROWS, STEP], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    if TUNING.copied:
        x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, LANES, COLUMNS, STEP], x_tiles.layout)
        x_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(x_bars.index(i), count=1)
    first, first_row = gl.program_id(0) * COLUMNS, gl.program_id(1) * ROWS
    for i in gl.static_range(STAGES):
        _request(weight, ring, bars, i, first_row, TUNING)
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    k = lane[:, None] * STEP + column[None, :]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, RESULT))
    inside = row < OUTPUTS
    of_row = gl.full([ROWS], factor, gl.float32, layout=gl.SliceLayout(1, RESULT))
    if SCALED:
        of_row *= gl.load(scale + row, mask=inside, other=0.0) * (1 / UNIT)
    AHEAD: gl.constexpr = min(TUNING.ahead, STEPS)
    of_norm = ()
    for step in gl.static_range(AHEAD):
        of_norm += (_factors(norm, k, step, SPAN),)
    if normed is not None:
        channel = gl.program_id(1) * _CHUNK + gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, BY_TOKEN))
        of_channel = gl.load(norm + channel, mask=channel < INPUTS, other=0.0).to(gl.float32)
    wait_for_previous_kernel()
    let_next_kernel_start()

    if TUNING.copied:
        for i in gl.static_range(STAGES):
            _request(x_tiles, x_ring, x_bars, i, first, TUNING)
    else:
        token = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
        elements, real = x + token[None, None, :] * x_stride + k[:, :, None], token < tokens
        ahead = ()
        for step in gl.static_range(AHEAD):
            ahead += (_tokens(elements, real, step, SPAN),)
    of_column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
    there = inside[:, None] & (of_column < tokens)[None, :]
    added = gl.zeros([ROWS, COLUMNS], gl.float32, layout=RESULT)
    if residual is not None:
        before = residual + of_column[None, :] * residual_stride + row[:, None]
        added = gl.load(before, mask=there, other=0.0).to(gl.float32)
    if bias is not None:
        added += gl.load(bias + row, mask=inside, other=0.0).to(gl.float32)[:, None] * factor
    if normed is not None:
        # Loaded here, so that at the end nothing has to be waited for.
        whole = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, BY_TOKEN))
        mine = (whole < tokens)[:, None] & (channel < INPUTS)[None, :]
        left = gl.load(x + whole[:, None] * x_stride + channel[None, :], mask=mine, other=0.0)

    total = gl.zeros([LANES, ROWS, COLUMNS], gl.float32, layout=ACC)
    squares = gl.zeros([LANES, COLUMNS], gl.float32, layout=gl.SliceLayout(1, RIGHT))
    for step in gl.static_range(STEPS):
        place, phase = step % STAGES, (step // STAGES) & 1
        if TUNING.copied:
            mbarrier.wait(x_bars.index(place), phase)
            values = x_ring.index(place).permute((0, 2, 1)).load(RIGHT)
        else:
            values, ahead = ahead[0], ahead[1:]
            if step + AHEAD < STEPS:
                ahead += (_tokens(elements, real, step + AHEAD, SPAN),)
        if norm is not None:
            squares += _squares(values)
        values = _operand(values, of_norm[0], OPERAND, UNIT)
        of_norm = of_norm[1:]
        if step + AHEAD < STEPS:
            of_norm += (_factors(norm, k, step + AHEAD, SPAN),)
        mbarrier.wait(bars.index(place), phase)
        tile = ring.index(place).load(LEFT)
        if step > 0 and step - 1 + STAGES < STEPS:
            # All warps have read the tiles of the step before.
            _request(weight, ring, bars, step - 1 + STAGES, first_row, TUNING)
            if TUNING.copied:
                _request(x_tiles, x_ring, x_bars, step - 1 + STAGES, first, TUNING)
        if SCALED:
            tile = tile.to(gl.float8e4nv, bitcast=True).to(OPERAND)
        total = mma_v2(tile, values, total)
    result = gl.sum(total, 0) * of_row[:, None]
    if norm is not None:
        inverse = gl.rsqrt(gl.sum(squares, 0) / INPUTS + eps)
        result *= gl.convert_layout(inverse, gl.SliceLayout(0, RESULT))[None, :]
        if normed is not None:
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, BY_TOKEN))
            left = left.to(gl.float32) * inverse[:, None] * of_channel[None, :]
            kept = normed + whole[:, None] * INPUTS + channel[None, :]
            gl.store(kept, left.to(normed.dtype.element_ty), mask=mine)
    after = out + of_column.to(gl.int64)[None, :] * OUTPUTS + row[:, None]
    gl.store(after, (result + added).to(out.dtype.element_ty), mask=there)
