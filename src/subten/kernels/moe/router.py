"""Which experts a token visits, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.moe.inputs import RouterSpec
from subten.kernels.precision import at_least_float32


def route(logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token from `logits` [tokens, num_experts].

    `correction` [num_experts] is added to the scores for the choice, not to the weights.

    Returns the experts, int64 [tokens, top_k], the highest score first, and their weights, of that shape and
    float32 (float64 for float64 logits). Equal scores go to the lowest expert index; `torch.topk`
    leaves that open, and a run could not be repeated on another device.
    """
    logits = at_least_float32(logits)
    scores = torch.sigmoid(logits) if rule.scoring == "sigmoid" else logits
    ranked = scores if correction is None else scores + correction
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    chosen = scores.gather(-1, experts)
    if rule.scoring == "sigmoid":
        weights = chosen / chosen.sum(-1, keepdim=True) if rule.renormalize else chosen
    elif rule.renormalize:
        weights = torch.softmax(chosen, dim=-1)
    else:
        weights = torch.softmax(logits, dim=-1).gather(-1, experts)
    return experts, weights * rule.factor if rule.factor != 1 else weights
