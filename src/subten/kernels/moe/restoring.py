"""All experts of a block in 16 bit and whole, for products that take them in no other way: as fast as the device
allows."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from subten.kernels.moe.inputs import Experts
from subten.kernels.moe.packing import EVERY, wide_down, wide_gate_up


def restored_gate_up(experts: Experts, dtype: torch.dtype) -> Tensor:
    """As `wide_gate_up`, to the bit."""
    if experts.gate_up_scale is None or not in_one_pass(experts.gate_up.device, dtype):
        return wide_gate_up(experts, EVERY, dtype)
    from subten.kernels.moe.triton_restore import restore

    return restore(experts.gate_up, experts.gate_up_scale, dtype, halves=2)


def restored_down(experts: Experts, dtype: torch.dtype) -> Tensor:
    """As `wide_down`, to the bit."""
    whole = experts.down_scale is None and experts.down.ndim == 3
    if whole or not in_one_pass(experts.down.device, dtype):
        return wide_down(experts, EVERY, dtype)
    from subten.kernels.moe.triton_restore import restore

    return restore(experts.down, experts.down_scale, dtype, halves=1)


def in_one_pass(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights can be: elsewhere torch takes two, or one with narrow loads."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
