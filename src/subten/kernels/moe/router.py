"""Which experts a token visits, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.moe.inputs import RouterSpec
from subten.kernels.precision import at_least_float32


def route(logits: Tensor, rule: RouterSpec) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token from `logits` [tokens, num_experts].

    Returns the experts, int64 [tokens, top_k], most probable first, and their weights, of that shape and
    float32 (float64 for float64 logits). Equal logits go to the lowest expert index; `torch.topk`
    leaves that open, and a run could not be repeated on another device.
    """
    logits = at_least_float32(logits)
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    experts = order[:, : rule.top_k]
    if rule.renormalize:
        return experts, torch.softmax(ranked[:, : rule.top_k], dim=-1)
    return experts, torch.softmax(logits, dim=-1).gather(-1, experts)
