"""The linear layer of a GPU: one launch for few tokens, the products of a library for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.plan import LinearShape, LinearTuning, tune_linear
from subten.kernels.linear.triton_decode import linear_decode
from subten.kernels.linear.triton_rows import finish_rows, norm_rows


@dataclass(frozen=True)
class DecodeKernel:
    """A kernel for few tokens.

    Attributes:
        decode: as `linear_decode` of triton_decode.py.
        tune: a shape, a number of tokens and the multiprocessors of a GPU to tiles.
    """

    decode: Callable[..., Tensor]
    tune: Callable[[LinearShape, int, int], LinearTuning]


TRITON = DecodeKernel(linear_decode, tune_linear)


class TritonLinear:
    """``linear(x, weights, ...)``, see `linear_reference`. It keeps the tiles it has chosen."""

    def __init__(self) -> None:
        self._tunings: dict[tuple[DecodeKernel, LinearShape, int, torch.device], LinearTuning] = {}

    def __call__(
        self,
        x: Tensor,
        weights: LinearWeights,
        *,
        norm: NormWeights | None = None,
        normed: Tensor | None = None,
        residual: Tensor | None = None,
        factor: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Up to `MOST_TOKENS_OF_A_LAUNCH` tokens in one launch, more through torch."""
        if len(x) > MOST_TOKENS_OF_A_LAUNCH:
            return linear_many(x, weights, norm=norm, normed=normed, residual=residual, factor=factor, dtype=dtype)
        outputs, inputs = weights.weight.shape
        out = torch.empty(len(x), outputs, dtype=dtype or x.dtype, device=x.device)
        if not len(x):
            return out
        kernel = self.kernel(x, weights)
        tuning = self.tuning(kernel, LinearShape(inputs, outputs, weights.weight.itemsize), len(x), x.device)
        return kernel.decode(x, weights, out, tuning, norm=norm, normed=normed, residual=residual, factor=factor)

    def kernel(self, x: Tensor, weights: LinearWeights) -> DecodeKernel:  # noqa: ARG002 - of others it depends on them
        """That multiplies few such tokens with such weights."""
        return TRITON

    def tuning(self, kernel: DecodeKernel, shape: LinearShape, tokens: int, device: torch.device) -> LinearTuning:
        """Tiles for so many tokens."""
        key = kernel, shape, tokens, device
        if key not in self._tunings:
            sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
            self._tunings[key] = kernel.tune(shape, tokens, sms)
        return self._tunings[key]


def linear_many(
    x: Tensor,
    weights: LinearWeights,
    *,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See `linear_reference`.

    Weights in FP8 are widened to the type of the tokens, which is exact, in every call: that moves three bytes per
    weight, little beside the product of many tokens. A product of FP8 by FP8 (`torch._scaled_mm`) would need no copy,
    but tokens rounded to four bits, and prompts would then be computed less accurately than what follows them.
    """
    if norm is not None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if normed is None else normed
        x = norm_rows(x, norm, out)
    elif normed is not None:
        x = normed.copy_(x)
    dtype = dtype or x.dtype
    if weights.scale is None and residual is None and factor == 1:
        return F.linear(x, weights.weight, weights.bias).to(dtype)
    y = F.linear(x, weights.weight.to(x.dtype))
    out = y if dtype == y.dtype else y.new_empty(y.shape, dtype=dtype)
    return finish_rows(y, weights.scale, weights.bias, residual, factor, out)


LINEAR = TritonLinear()
