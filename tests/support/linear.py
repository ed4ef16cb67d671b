"""Linear layers for tests: random ones, and what they give in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.checkpoints.fp8 import quantise_channels
from subten.kernels.linear.inputs import LinearWeights, NormWeights

EPS = 1e-6


def layer(
    outputs: int, inputs: int, kind: str, *, bias: bool = False, seed: int = 0, device: str = "cpu"
) -> LinearWeights:
    """In "bf16", "fp16" or "fp8"; outputs of order one for tokens of order one."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator, device=device) * inputs**-0.5
    wide = torch.float16 if kind == "fp16" else torch.bfloat16
    added = torch.randn(outputs, generator=generator, device=device).to(wide) if bias else None
    if kind != "fp8":
        return LinearWeights(weight.to(wide), added)
    codes, scale = quantise_channels(weight)
    return LinearWeights(codes, added, scale[:, 0])


def rows(
    count: int, width: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 1, device: str = "cpu"
) -> Tensor:
    """Of a residual stream: a few channels are a hundred times as large as the others."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, width, generator=generator, device=device)
    x[:, 3::97] *= 100
    return x.to(dtype)


def norm_of(width: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 2, device: str = "cpu") -> NormWeights:
    generator = torch.Generator(device).manual_seed(seed)
    return NormWeights((0.5 + torch.rand(width, generator=generator, device=device)).to(dtype), EPS)


def normed_exactly(x: Tensor, norm: NormWeights) -> Tensor:
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def exactly(
    x: Tensor,
    weights: LinearWeights,
    *,
    norm: NormWeights | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The definition, in float64."""
    values = x.double() if norm is None else normed_exactly(x, norm)
    weight = weights.weight.double()
    if weights.scale is not None:
        weight = weight * weights.scale.double()[:, None]
    y = values @ weight.T
    y = (y if weights.bias is None else y + weights.bias.double()) * factor
    return y if residual is None else residual.double() + y


def error(found: Tensor, exact: Tensor) -> float:
    """Of the worst token, relative to its length."""
    return float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-30)).max())
