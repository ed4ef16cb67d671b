"""A linear layer for 1 to 64 tokens, with the norm before it and the residual behind it: Triton, from sm_80 on.

Weights lie along the rows of the tensor core's tiles, of which there are always enough, and tokens along the columns:
8 of them at least. A program has some rows of the weights and all tokens. Its warps (`lanes`, the leading axis of all
tensors) take parts of the columns of the weights in turn, and their sums are added up in pairs at the end. So memory
is read by as many threads as can be, there is no second launch and no scratch memory, and a token's bits depend on
neither the other tokens nor how many there are.

The norm's mean square comes from the same tiles of tokens; it is added up at the end, as a product with ones, whose
order of additions does not depend on the layout of a tile either. What all channels of a token have in common is then
applied to the product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.plan import LinearShape, LinearTuning

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_UNIT = tl.constexpr(2.0**-4)
"""Of tokens as fp16 operands, beside weights in FP8: elements of up to a million are finite, and those down to 1e-3
have the 8 bits of mantissa of bf16."""


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
    """See `linear_reference`; up to as many tokens as `tuning` has columns for.

    Operands of the tensor core are in the weights' 16-bit type, or in fp16 for weights in FP8; sums, norm and
    residual in float32, rounded once. The host reads nothing back, so that a CUDA graph can capture the call. A NaN
    stays in its token.

    Args:
        x: [tokens, in] in 16 bit, rows of contiguous elements.
        weights: the layer, contiguous.
        out: [tokens, out], where the result goes.
        tuning: how the work is shared.
        norm: see `linear_reference`.
        normed: likewise.
        residual: likewise, rows of contiguous elements.
        factor: likewise.
    """
    arguments = linear_arguments(x, weights, out, tuning, norm, normed, residual, factor)
    grid = triton.cdiv(len(x), tuning.columns), triton.cdiv(len(weights.weight), tuning.rows)
    linear_kernel[grid](**arguments, num_warps=tuning.lanes)
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
    """All arguments of `linear_kernel`, see `linear_decode`."""
    outputs, inputs = weights.weight.shape
    return {
        "x": x,
        "weight": weights.weight,
        "scale": weights.scale,
        "bias": weights.bias,
        "norm": norm and norm.weight,
        "normed": normed,
        "residual": residual,
        "out": out,
        "tokens": len(x),
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "eps": 0.0 if norm is None else norm.eps,
        "factor": float(factor),
        "SHAPE": LinearShape(inputs, outputs, weights.weight.itemsize),
        "TUNING": tuning,
    }


@triton.jit
def _product(x, y):
    """In 16 bit: two at a time, and rounded as tokens after a norm are. The interpreter has no numbers of bf16."""
    if _INTERPRETED:
        return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)
    else:
        return x * y


@triton.jit
def _sum_of_lanes(values, TUNING: tl.constexpr):
    """Of [lanes, rows, columns] over the lanes, two and two: a sum of two has but one result."""
    BITS: tl.constexpr = TUNING.lane_bits
    for _ in tl.static_range(BITS):
        values = tl.sum(tl.reshape(values, [values.shape[0] // 2, 2, values.shape[1], values.shape[2]]), 1)
    return tl.reshape(values, [values.shape[1], values.shape[2]])


@triton.jit
def _sum_of_columns(values, TUNING: tl.constexpr):
    """Of [lanes, step, columns] over lanes and steps, as products with ones: in an order that the layout of a tile
    has no part in. Three terms of 8 bits each are all of a float32."""
    ones = tl.full([values.shape[0], 16, values.shape[1]], 1.0, tl.float32).to(tl.bfloat16)
    total = tl.zeros([values.shape[0], 16, values.shape[2]], tl.float32)
    for _ in tl.static_range(3):
        term = values.to(tl.bfloat16)
        total = tl.dot(ones, term, total)
        values -= term.to(tl.float32)
    # All rows are alike; of one and zeros the sum is that one.
    row = tl.arange(0, 16)[:, None]
    return tl.sum(tl.where(row == 0, _sum_of_lanes(total, TUNING), 0.0), 0)


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, weight, scale, bias, norm, normed, residual, out, tokens, x_stride, residual_stride, eps, factor,
    SHAPE: tl.constexpr, TUNING: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of `columns` tokens, and of `rows` output channels."""
    LANES: tl.constexpr = TUNING.lanes
    ROWS: tl.constexpr = TUNING.rows
    COLUMNS: tl.constexpr = TUNING.columns
    STEP: tl.constexpr = TUNING.step
    INPUTS: tl.constexpr = SHAPE.inputs
    OUTPUTS: tl.constexpr = SHAPE.outputs
    EVEN: tl.constexpr = INPUTS % (LANES * STEP) == 0
    WHOLE: tl.constexpr = OUTPUTS % ROWS == 0
    lane, k = tl.arange(0, LANES), tl.arange(0, STEP)
    token = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, real = row < OUTPUTS, token < tokens
    column = lane[:, None] * STEP + k[None, :]
    weights = weight + row.to(tl.int64)[None, :, None] * INPUTS + column[:, None, :]
    elements = x + token[None, None, :] * x_stride + column[:, :, None]
    operand: tl.constexpr = weight.dtype.element_ty if scale is None else tl.float16
    unit: tl.constexpr = 1.0 if scale is None else _UNIT
    total = tl.zeros([LANES, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([LANES, STEP, COLUMNS], tl.float32)
    for start in tl.range(0, INPUTS, LANES * STEP, num_stages=TUNING.stages):
        # What is not read is zero, in weights as in tokens.
        if EVEN and WHOLE:
            tile = tl.load(weights + start, eviction_policy="evict_first")
        else:
            exists = inside[None, :, None] & (start + column < INPUTS)[:, None, :]
            tile = tl.load(weights + start, mask=exists, other=0.0, eviction_policy="evict_first")
        if EVEN:
            values = tl.load(elements + start, mask=real[None, None, :], other=0.0)
        else:
            there = real[None, None, :] & (start + column < INPUTS)[:, :, None]
            values = tl.load(elements + start, mask=there, other=0.0)
        if norm is not None:
            wide = values.to(tl.float32)
            squares += wide * wide
            if EVEN:
                factors = tl.load(norm + start + column)
            else:
                factors = tl.load(norm + start + column, mask=start + column < INPUTS, other=0.0)
            values = _product(values, factors.to(values.dtype)[:, :, None])
        if scale is not None:
            values = (values.to(tl.float32) * unit).to(operand)
        total = tl.dot(tile.to(operand), values, total)
    result = _sum_of_lanes(total, TUNING)
    if norm is not None:
        inverse = tl.rsqrt(_sum_of_columns(squares, TUNING) / INPUTS + eps)
        result *= inverse[None, :]
        if normed is not None:
            _store_normed(x, norm, normed, inverse, token, real, x_stride, INPUTS)
    if scale is not None:
        result *= (tl.load(scale + row, mask=inside, other=0.0) * (1 / unit))[:, None]
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    result *= factor
    there = inside[:, None] & real[None, :]
    if residual is not None:
        before = residual + token[None, :] * residual_stride + row[:, None]
        result += tl.load(before, mask=there, other=0.0).to(tl.float32)
    after = out + token.to(tl.int64)[None, :] * OUTPUTS + row[:, None]
    tl.store(after, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _store_normed(x, norm, normed, inverse, token, real, x_stride, INPUTS: tl.constexpr):
    """Each program of a block of tokens does some columns."""
    PART: tl.constexpr = 64
    for start in range(tl.program_id(1) * PART, INPUTS, tl.num_programs(1) * PART):
        column = start + tl.arange(0, PART)
        there = (column < INPUTS)[None, :] & real[:, None]
        values = tl.load(x + token[:, None] * x_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        factors = tl.load(norm + column, mask=column < INPUTS, other=0.0).to(tl.float32)
        values = values * inverse[:, None] * factors[None, :]
        tl.store(normed + token[:, None] * INPUTS + column[None, :], values.to(normed.dtype.element_ty), mask=there)
