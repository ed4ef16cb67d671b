"""Blocks of experts for tests, and what they compute, from the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subten.kernels.moe import MoEWeights, RouterSpec, SharedExpertWeights
from subten.kernels.moe.packing import quantised, wide_down, wide_gate_up

HIDDEN, INTERMEDIATE = 128, 64
EVERY = slice(None)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block(
    rule: RouterSpec,
    kind: str = "bf16",
    *,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shared: int = 0,
    gated: bool = True,
    corrected: bool = False,
    seed: int = 0,
) -> MoEWeights:
    """Random, in "bf16", "fp16", or FP8 with scales by "channel" or "block"."""
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    parts = iter(range(seed * 100, seed * 100 + 100))

    def weight(*shape: int) -> Tensor:
        return (gaussian(*shape, seed=next(parts)) / shape[-1] ** 0.5).to(dtype)

    made = MoEWeights(
        rule,
        weight(rule.num_experts, hidden) * 3,
        weight(rule.num_experts, 2 * intermediate, hidden),
        weight(rule.num_experts, hidden, intermediate),
        SharedExpertWeights(weight(2 * shared, hidden), weight(hidden, shared), weight(1, hidden) if gated else None)
        if shared
        else None,
        correction=0.2 * gaussian(rule.num_experts, seed=next(parts)) if corrected else None,
    )
    return made if kind in ("bf16", "fp16") else quantised(made, blocks=kind == "block")


def tokens(count: int, hidden: int = HIDDEN, seed: int = 999_983, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return gaussian(count, hidden, seed=seed).to(dtype)


def logits_of(x: Tensor, weights: MoEWeights) -> Tensor:
    """Of router and shared gate in float32, as both a kernel and the definition shall see them."""
    logits = x.float() @ weights.router.float().T
    if weights.shared is None or weights.shared.gate is None:
        return logits
    return torch.cat([logits, x.float() @ weights.shared.gate.float().T], 1)


def expected(x: Tensor, weights: MoEWeights, logits: Tensor) -> Tensor:
    """Every expert on every token in float64, mixed by a matrix that is zero where a token does not visit."""
    rule, x, logits = weights.rule, x.double(), logits.double()
    ranked = logits[:, : rule.num_experts]
    scores = torch.sigmoid(ranked) if rule.scoring == "sigmoid" else torch.softmax(ranked, -1)
    if rule.scoring == "sigmoid":
        ranked = scores if weights.correction is None else scores + weights.correction
    places = ranked.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    mixing = torch.where(places < rule.top_k, scores, 0)
    if rule.renormalize:
        mixing = mixing / mixing.sum(-1, keepdim=True)
    result = torch.einsum("te,eth->th", rule.factor * mixing, _outputs(x, weights.experts))
    if weights.shared is not None:
        share = 1 if weights.shared.gate is None else torch.sigmoid(logits[:, -1:])
        result = result + share * _outputs(x, weights.shared.expert)[0]
    return result


def _outputs(x: Tensor, experts) -> Tensor:
    gate, up = torch.einsum("th,eih->eti", x, wide_gate_up(experts, EVERY, torch.float64)).chunk(2, -1)
    return torch.einsum("eti,ehi->eth", gate * torch.sigmoid(gate) * up, wide_down(experts, EVERY, torch.float64))


def error(result: Tensor, exact: Tensor) -> float:
    """Relative, of the token where it is largest."""
    return float(((result.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


def poisoned(weights: MoEWeights, idle: list[int]) -> MoEWeights:
    """With NaN in experts that are not to be read."""
    changed = replace(weights, gate_up=weights.gate_up.clone(), down=weights.down.clone())
    for tensor in (changed.gate_up, changed.down):
        tensor.view(torch.uint8).view(len(tensor), -1)[idle] = 0x7F
        if tensor.element_size() == 2:
            tensor[idle] = torch.nan
    return changed
