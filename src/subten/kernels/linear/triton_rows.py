"""What is around the product of many tokens, a launch each: the norm before it, scale, bias and residual after it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subten.kernels.linear.inputs import NormWeights

_MOST_COLUMNS = 1024
"""Of a program of `finish_kernel`."""
FINISH_WARPS = 4


def norm_rows(x: Tensor, norm: NormWeights, out: Tensor) -> Tensor:
    """As `rms_norm_reference`, of `x` [tokens, width] with contiguous rows, into `out`, contiguous and of its shape
    and dtype; returns `out`."""
    if len(x):
        norm_kernel[(len(x),)](
            **norm_arguments(x, norm, out), num_warps=norm_warps(x.shape[1]), enable_fp_fusion=False
        )
    return out


def norm_arguments(x: Tensor, norm: NormWeights, out: Tensor) -> dict[str, Any]:
    """All arguments of `norm_kernel`."""
    return {
        "x": x,
        "weight": norm.weight,
        "out": out,
        "eps": norm.eps,
        "x_row": x.stride(0),
        "WIDTH": x.shape[1],
        "PADDED": triton.next_power_of_2(x.shape[1]),
    }


def norm_warps(width: int) -> int:
    """Of a program: 16 numbers a thread, up to 16 warps."""
    return max(1, min(16, int(triton.next_power_of_2(width)) // 512))


@triton.jit
def norm_kernel(x, weight, out, eps, x_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """A token. Grid: (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


def finish_rows(
    y: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, factor: float, out: Tensor
) -> Tensor:
    """``residual + factor * (y * scale + bias)`` in float32, rounded once.

    Args:
        y: [tokens, outputs], contiguous.
        scale: float32 [outputs], or None.
        bias: [outputs], or None.
        residual: [tokens, outputs], rows of contiguous elements, or None.
        factor: of the product.
        out: contiguous, of y's shape; it may be y.

    Returns:
        `out`.
    """
    if len(y):
        arguments = finish_arguments(y, scale, bias, residual, factor, out)
        finish_kernel[(len(y), triton.cdiv(y.shape[1], arguments["COLUMNS"]))](
            **arguments, num_warps=FINISH_WARPS, enable_fp_fusion=False
        )
    return out


def finish_arguments(
    y: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, factor: float, out: Tensor
) -> dict[str, Any]:
    """All arguments of `finish_kernel`."""
    return {
        "y": y,
        "scale": scale,
        "bias": bias,
        "residual": residual,
        "out": out,
        "factor": factor,
        "residual_row": 0 if residual is None else residual.stride(0),
        "OUTPUTS": y.shape[1],
        "COLUMNS": min(_MOST_COLUMNS, triton.next_power_of_2(y.shape[1])),
    }


@triton.jit
def finish_kernel(y, scale, bias, residual, out, factor, residual_row, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some outputs of a token. Grid: (tokens, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < OUTPUTS
    result = tl.load(y + row * OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        result *= tl.load(scale + column, mask=inside, other=0.0)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result *= factor
    if residual is not None:
        result += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + column, result.to(out.dtype.element_ty), mask=inside)
