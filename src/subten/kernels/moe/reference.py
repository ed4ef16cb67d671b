"""The mixture-of-experts block in plain torch, and what it costs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.moe.inputs import Experts, MoEWeights, RouterSpec
from subten.kernels.moe.packing import wide_down, wide_gate_up
from subten.kernels.moe.router import route
from subten.kernels.precision import at_least_float32


def moe_reference(
    x: Tensor,
    weights: MoEWeights,
    *,
    logits: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Mix the SwiGLU experts of each token of `x` [tokens, hidden]; returns the same shape and dtype.

    Args:
        x: the tokens.
        weights: the block.
        logits: of the router [tokens, num_experts], and in one more column that of the shared expert's gate where it
            has one. By default computed here.
        residual: [tokens, hidden], what the result is added to.
        factor: of the result before that.

    Each expert that was chosen at all is visited once, in ascending order, with the tokens routed to it. The
    experts' outputs are summed in float32 (float64 for float64 tokens) and rounded once, so a token's result
    depends on the rest of the batch only through the shape of the matrix products. A NaN in one token stays in
    that token. Experts in FP8 are restored, one after the other, in the dtype of `x`.
    """
    logits = router_logits(x, weights) if logits is None else logits
    chosen, expert_weights = route(logits[:, : weights.rule.num_experts], weights.rule, weights.correction)
    output = torch.zeros_like(at_least_float32(x))
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, choice = (chosen == expert).nonzero(as_tuple=True)
        visited = _visit(x[tokens], weights.experts, expert)
        output.index_add_(0, tokens, at_least_float32(visited) * expert_weights[tokens, choice, None])
    if weights.shared is not None:
        visited = _visit(x, weights.shared.expert, 0)
        output += visited if weights.shared.gate is None else gate_share(logits) * visited
    return onto(residual, output.to(x.dtype), factor)


def router_logits(x: Tensor, weights: MoEWeights) -> Tensor:
    """[tokens, num_experts], and in one more column that of the shared expert's gate where it has one."""
    logits, shared = F.linear(x, weights.router), weights.shared
    if shared is None or shared.gate is None:
        return logits
    return torch.cat([logits, F.linear(x, shared.gate)], 1)


def gate_share(logits: Tensor) -> Tensor:
    """[tokens, 1], of the shared expert, from logits with a column for it."""
    return torch.sigmoid(at_least_float32(logits[:, -1:]))


def onto(residual: Tensor | None, output: Tensor, factor: float) -> Tensor:
    """``residual + factor * output``"""
    if residual is not None:
        return torch.add(residual, output, alpha=factor)
    return output if factor == 1 else output * factor


def _visit(x: Tensor, experts: Experts, expert: int) -> Tensor:
    which = slice(expert, expert + 1)
    return _swiglu(x, wide_gate_up(experts, which, x.dtype)[0], wide_down(experts, which, x.dtype)[0])


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU feed-forward (Shazeer, 2020, arXiv:2002.05202)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def moe_flops(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    router: RouterSpec,
    shared_intermediate_size: int = 0,
) -> int:
    """The matrix products of the router, of `top_k` experts per token, of the shared expert (0: none) and its gate.
    Not what is done to single elements: SwiGLU's product, shares and sums."""
    expert = 6 * hidden_size * intermediate_size
    shared = 6 * hidden_size * shared_intermediate_size + 2 * hidden_size * (shared_intermediate_size > 0)
    return num_tokens * (2 * hidden_size * router.num_experts + router.top_k * expert + shared)


def moe_bytes(
    num_tokens: int,
    active_experts: float,
    hidden_size: int,
    intermediate_size: int,
    router: RouterSpec,
    shared_intermediate_size: int = 0,
    *,
    activation_itemsize: int = 2,
    weight_itemsize: int = 2,
) -> float:
    """Tokens in and out, the router, the shared expert, and the weights of the experts that were visited.

    `active_experts` is the number of different experts visited: a count, or `expected_active_experts`. The
    router and the shared expert's gate are kept at `activation_itemsize`, whatever the experts are stored in.
    """
    expert = 3 * hidden_size * intermediate_size
    shared = 3 * hidden_size * shared_intermediate_size
    gates = hidden_size * (router.num_experts + (shared_intermediate_size > 0))
    activations = 2 * num_tokens * hidden_size
    return (activations + gates) * activation_itemsize + (active_experts * expert + shared) * weight_itemsize


def expected_active_experts(num_tokens: int, router: RouterSpec) -> float:
    """How many different experts the tokens visit on average if they choose evenly and independently."""
    return router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** num_tokens)
