"""The affine map of a linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: `x` [..., in], `weight` [out, in], `bias` [out] or None, all of one dtype."""
    return F.linear(x, weight, bias)


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
