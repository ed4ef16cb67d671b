"""The mixture of experts of NVIDIA GPUs from sm_80 on."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.one_launch import OneLaunchMoE
from subten.kernels.moe.plan import Activations, MoEPlan, MoEShape, Sums, plan_moe, refusal
from subten.kernels.moe.triton_decode import MoEScratch, moe_decode, multiprocessors


class TritonMoE(OneLaunchMoE[MoEPlan]):
    """See `OneLaunchMoE`."""

    name = "triton"

    def __init__(self, activations: Activations = "16bit", sums: Sums = "fixed") -> None:
        super().__init__()
        self.activations = activations
        self.sums = sums

    def refuse(self, weights: MoEWeights) -> str | None:
        """See `OneLaunchMoE.refuse`."""
        blocks = [weights.experts, *([weights.shared.expert] if weights.shared else [])]
        return next((reason for reason in map(refusal, blocks) if reason), None)

    def make_plan(self, shape: MoEShape, tokens: int, device: torch.device) -> MoEPlan:
        """See `OneLaunchMoE.make_plan`."""
        activations = self.activations if shape.scales != "none" else "16bit"
        return plan_moe(shape, tokens, multiprocessors(device), activations, self.sums)

    def launch(
        self,
        x: Tensor,
        weights: MoEWeights,
        plan: MoEPlan,
        scratch: MoEScratch,
        logits: Tensor | None,
        residual: Tensor | None,
        factor: float,
    ) -> Tensor:
        """See `OneLaunchMoE.launch`."""
        return moe_decode(x, weights, plan, scratch, logits=logits, residual=residual, factor=factor)


MOE = TritonMoE()
