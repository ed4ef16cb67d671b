"""The precision in which the references compute."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if that is what it is: a float64 model is an oracle for the float32 one."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
