"""The mixture of experts of an sm_90 GPU: one launch for few tokens, grouped GEMMs for many."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.kernels.moe.gluon_decode import moe_decode
from subten.kernels.moe.gluon_plan import SLICE, GluonMoEPlan, plan_gluon_moe, shape_refusal
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.one_launch import OneLaunchMoE
from subten.kernels.moe.packing import cut_down
from subten.kernels.moe.plan import MoEShape, Sums, refusal
from subten.kernels.moe.triton_decode import MoEScratch, multiprocessors


class GluonMoE(OneLaunchMoE[GluonMoEPlan]):
    """See `OneLaunchMoE`. The down projections are cut (`pack`).

    Args:
        sums: "fixed" gives a token the same bits in any batch; "float" is a little faster, and does not.
    """

    def __init__(self, sums: Sums = "fixed") -> None:
        super().__init__()
        self.name = "gluon" if sums == "fixed" else "gluon-float"
        self._sums = sums

    def refuse(self, weights: MoEWeights) -> str | None:
        """See `OneLaunchMoE.refuse`."""
        blocks = [weights.experts, *([weights.shared.expert] if weights.shared else [])]
        shape = MoEShape.of(weights)
        if shape.cut != SLICE:
            return f"its down projections are cut into slices of {SLICE}, see pack"
        sizes = shape_refusal(shape.hidden, shape.intermediate, shape.shared)
        return next((reason for reason in map(refusal, blocks) if reason), sizes)

    def make_plan(self, shape: MoEShape, tokens: int, device: torch.device) -> GluonMoEPlan:
        """See `OneLaunchMoE.make_plan`."""
        return plan_gluon_moe(shape, tokens, multiprocessors(device), self._sums)

    def launch(
        self,
        x: Tensor,
        weights: MoEWeights,
        plan: GluonMoEPlan,
        scratch: MoEScratch,
        logits: Tensor | None,
        residual: Tensor | None,
        factor: float,
    ) -> Tensor:
        """See `OneLaunchMoE.launch`."""
        return moe_decode(x, weights, plan, scratch, logits=logits, residual=residual, factor=factor)


def pack(weights: MoEWeights) -> MoEWeights:
    """Experts as `GluonMoE` takes them: changed in place, see `cut_down`."""
    return cut_down(weights, SLICE)


MOE = GluonMoE()
FLOAT = GluonMoE("float")
