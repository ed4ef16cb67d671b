"""A mixture of experts step by step: softmax, top-k, sort, gather, two grouped GEMMs with the activation between
them, scatter. What fusing is measured against, and the way of prompts, whose tokens fill tiles of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.reference import gate_share, onto, router_logits
from subten.kernels.moe.restoring import restored_down, restored_gate_up
from subten.kernels.moe.router import route
from subten.kernels.precision import at_least_float32


def moe_unfused(
    x: Tensor,
    weights: MoEWeights,
    *,
    logits: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Mix the SwiGLU experts of each token of `x` [tokens, hidden]; returns the same shape and dtype.

    For the arguments see `moe_reference`.

    Nothing is read back to the host and no shape depends on the routing: a CUDA graph can capture it. Where torch has
    no grouped GEMM for the device and dtype (it has for bfloat16 from compute capability 9.0 on), every expert is
    applied to every row and the right one chosen. Experts in FP8 are restored in `x`'s dtype, which takes memory for
    the block in that dtype. Sums are in float32 (float64 for float64).
    """
    logits = router_logits(x, weights) if logits is None else logits
    chosen, shares = route(logits[:, : weights.rule.num_experts], weights.rule, weights.correction)
    order = chosen.flatten().argsort(stable=True)
    by_expert = chosen.flatten()[order]
    numbers = torch.arange(weights.rule.num_experts, device=x.device)
    ends = torch.searchsorted(by_expert, numbers, right=True).int()
    rows = x[order // weights.rule.top_k]
    gate, up = _grouped(rows, restored_gate_up(weights.experts, x.dtype), ends, by_expert).chunk(2, -1)
    visited = _grouped(F.silu(gate) * up, restored_down(weights.experts, x.dtype), ends, by_expert)
    sorted_back = torch.empty_like(at_least_float32(visited))
    sorted_back[order] = at_least_float32(visited) * shares.flatten()[order, None]
    output = sorted_back.view(*chosen.shape, -1).sum(1)
    if weights.shared is not None:
        output += _shared(x, weights, logits)
    return onto(residual, output.to(x.dtype), factor)


def has_grouped_gemm(x: Tensor) -> bool:
    """Whether torch has one for such rows that asks nothing of the host."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor, by_expert: Tensor) -> Tensor:
    """Sorted `rows` [n, in], each times its expert's matrix of `weight` [E, out, in]; those of e end at ends[e]."""
    if has_grouped_gemm(rows):
        result: Tensor = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return result
    result = rows.new_zeros(len(rows), weight.shape[1])
    for expert, matrix in enumerate(weight):
        result = torch.where((by_expert == expert)[:, None], F.linear(rows, matrix), result)
    return result


def _shared(x: Tensor, weights: MoEWeights, logits: Tensor) -> Tensor:
    assert weights.shared is not None
    expert = weights.shared.expert
    first, up = F.linear(x, restored_gate_up(expert, x.dtype)[0]).chunk(2, -1)
    visited = at_least_float32(F.linear(F.silu(first) * up, restored_down(expert, x.dtype)[0]))
    return visited if weights.shared.gate is None else gate_share(logits) * visited
