"""What a linear layer is given besides its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LinearWeights:
    """``y = x @ weight.T * scale + bias``."""

    weight: Tensor
    """[out, in], in the dtype of the activations, or in e4m3 with a scale."""
    bias: Tensor | None = None
    """[out]"""
    scale: Tensor | None = None
    """float32 [out], one per output channel."""

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight times its scale, [out, in]."""
        if self.scale is None:
            return self.weight.to(dtype)
        return (self.weight.to(torch.float32) * self.scale[:, None]).to(dtype)


@dataclass(frozen=True)
class NormWeights:
    """Of an RMS norm: `weight` [width], and what is added to the mean square."""

    weight: Tensor
    eps: float
