"""The linear layer in plain torch, and what it costs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.norm import rms_norm_reference
from subten.kernels.precision import at_least_float32


def linear_reference(
    x: Tensor,
    weights: LinearWeights,
    *,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``residual + factor * linear(rms_norm(x))``.

    Weights in e4m3 are widened in every call, exactly; their scale is applied to the product, in float32 at least.

    Args:
        x: [tokens, in].
        weights: the layer.
        norm: of `x` before it is multiplied.
        normed: [tokens, in], where to leave `x` after the norm for others.
        residual: [tokens, out], what the result is added to.
        factor: of the result before that.
        dtype: of the result; by default x's.

    Returns:
        [tokens, out]
    """
    if norm is not None:
        x = rms_norm_reference(x, norm.weight, norm.eps)
    if normed is not None:
        normed.copy_(x)
    if weights.scale is None:
        y = F.linear(x, weights.weight, weights.bias)
    else:
        wide = at_least_float32(x)
        y = F.linear(wide, weights.weight.to(wide.dtype)) * weights.scale
        y = (y if weights.bias is None else y + weights.bias).to(x.dtype)
    if residual is not None:
        y = torch.add(residual, y, alpha=factor)
    elif factor != 1:
        y = y * factor
    return y if dtype is None else y.to(dtype)


def linear_flops(num_rows: int, in_features: int, out_features: int) -> int:
    """The matrix product: a multiply-add per row and weight."""
    return 2 * num_rows * in_features * out_features


def linear_bytes(
    num_rows: int,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    activation_itemsize: int = 2,
    weight_itemsize: int = 2,
) -> int:
    """Rows in and out at `activation_itemsize` bytes per element, weight and bias at `weight_itemsize`."""
    activations = num_rows * (in_features + out_features)
    weights = out_features * (in_features + bias)
    return activations * activation_itemsize + weights * weight_itemsize
