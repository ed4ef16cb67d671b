"""Which experts a token visits, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.moe.inputs import RouterSpec


def route(logits: Tensor, rule: RouterSpec) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token from `logits` [tokens, num_experts].

    Returns the experts, int64 [tokens, top_k], most probable first, and their weights, float32 of that shape.
    Equal logits go to the lowest expert index; `torch.topk` leaves that open, and a run could not be repeated
    on another device.
    """
    logits = logits.float()
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    experts = order[:, : rule.top_k]
    if rule.renormalize:
        return experts, torch.softmax(ranked[:, : rule.top_k], dim=-1)
    return experts, torch.softmax(logits, dim=-1).gather(-1, experts)
