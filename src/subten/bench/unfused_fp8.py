"""A mixture of experts step by step, in FP8 throughout: what fusing is measured against where weights are FP8.

The engine's own unfused kernel restores such weights in 16 bit first; torch's grouped GEMM takes them as they are
where every output channel has a scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.errors import KernelUnavailableError
from subten.kernels.moe import Experts, MoEWeights, route
from subten.kernels.moe.packing import E4M3, E4M3_MAX
from subten.kernels.moe.reference import gate_share, onto, router_logits


def moe_unfused_fp8(
    x: Tensor,
    weights: MoEWeights,
    *,
    logits: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """``moe(x, weights)``, see `moe_reference`; for bf16 tokens on a GPU that has torch's scaled grouped GEMM.

    Rows of both products are rounded to e4m3 with a scale each. A CUDA graph can hold it.

    Raises:
        KernelUnavailableError: weights whose scales do not go by output channel.
    """
    logits = router_logits(x, weights) if logits is None else logits
    chosen, shares = route(logits[:, : weights.rule.num_experts], weights.rule, weights.correction)
    order = chosen.flatten().argsort(stable=True)
    numbers = torch.arange(weights.rule.num_experts, device=x.device)
    ends = torch.searchsorted(chosen.flatten()[order], numbers, right=True).int()
    visited = _visit(x[order // weights.rule.top_k], weights.experts, ends)
    sorted_back = torch.empty(visited.shape, dtype=torch.float32, device=x.device)
    sorted_back[order] = visited.float() * shares.flatten()[order, None]
    output = sorted_back.view(*chosen.shape, -1).sum(1)
    if weights.shared is not None:
        everyone = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        shared = _visit(x, weights.shared.expert, everyone).float()
        output += shared if weights.shared.gate is None else gate_share(logits) * shared
    return onto(residual, output.to(x.dtype), factor)


def _visit(rows: Tensor, experts: Experts, ends: Tensor) -> Tensor:
    """SwiGLU of rows that are sorted by expert; those of e end at ends[e]."""
    gate, up = _scaled(rows, experts.gate_up, experts.gate_up_scale, ends).chunk(2, 1)
    return _scaled(F.silu(gate) * up, experts.down, experts.down_scale, ends)


def _scaled(rows: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    if scale is None or scale.ndim != 2:
        raise KernelUnavailableError("torch's grouped GEMM takes experts in FP8 with a scale per output channel")
    unit = (rows.float().abs().amax(1) / E4M3_MAX).clamp_min(1e-12)
    codes = (rows.float() / unit[:, None]).to(E4M3)
    result: Tensor = torch._scaled_grouped_mm(
        codes, weight.transpose(1, 2), unit, scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result
