"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.precision import at_least_float32


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [..., width] to unit root mean square, then by `weight` [width].

    Computed in float32 at least and rounded once, to x's dtype.
    """
    wide = at_least_float32(x)
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def rms_norm_flops(num_rows: int, width: int) -> int:
    """Square, sum, scale and weight every element; divide, add eps and take the root once per row."""
    return num_rows * (4 * width + 3)


def rms_norm_bytes(num_rows: int, width: int, itemsize: int) -> int:
    """Rows in and out, and the weight; `itemsize` bytes per element."""
    return (2 * num_rows * width + width) * itemsize
