"""Kernels by name: which are measured of a case, and what a one-launch kernel takes, plans and is compiled as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch

from subten.bench.moe_cases import MODELS, MoECase
from subten.kernels.moe import MoEWeights
from subten.kernels.moe.gluon_plan import (
    REGISTERS,
    SLICE,
    WARPS,
    GluonMoEPlan,
    GluonMoETuning,
    plan_gluon_moe,
    shape_refusal,
)
from subten.kernels.moe.packing import cut_down
from subten.kernels.moe.plan import Activations, MoEPlan, MoEShape, MoETuning, Sums, plan_moe

Kernel = Literal["gluon", "triton", "unfused"]
"""The first two are one launch, of a prompt one for 64 tokens; the last is step by step, with experts in FP8 restored
in the call."""
Plan = MoEPlan | GluonMoEPlan


@dataclass(frozen=True)
class Variant:
    """One figure of a case."""

    kernel: Kernel
    activations: Activations
    sums: Sums


def variants(
    case: MoECase, kernels: Sequence[Kernel], activations: Sequence[Activations], sums: Sequence[Sums]
) -> list[Variant]:
    """What is measured of a case. Weights in 16 bit are multiplied in 16 bit only, and by the Gluon kernel all are.
    It does not serve every shape. What is unfused is there for prompts."""
    kinds: Sequence[Activations] = ["16bit"] if case.weights == "bf16" else activations
    launched = [
        Variant(kernel, kind, one)
        for kernel in kernels
        if kernel != "unfused"
        for kind in kinds
        for one in sums
        if kernel == "triton" or (kind == "16bit" and gluon_serves(case.shape))
    ]
    unfused = [Variant("unfused", "16bit", "float")] if case.is_prompt and "unfused" in kernels else []
    return launched + unfused


def gluon_serves(shape: str) -> bool:
    """Whether the Gluon kernel takes experts of such sizes."""
    # Tokens of the shipped model are half as wide as it takes.
    model = MODELS.get(shape)
    return model is not None and shape_refusal(model.hidden, model.intermediate, model.shared) is None


def module_of(kernel: Kernel) -> ModuleType:
    """Of a one-launch kernel: with `moe_decode`, `decode_arguments` and `moe_kernel`."""
    return import_module(f"subten.kernels.moe.{kernel}_decode")


def make_plan(variant: Variant, shape: MoEShape, tokens: int, num_sms: int, tuning: Any = None) -> Plan:
    """The default one, or what follows from these tiles."""
    if variant.kernel == "gluon":
        return plan_gluon_moe(shape, tokens, num_sms, variant.sums, tuning)
    return plan_moe(shape, tokens, num_sms, variant.activations, variant.sums, tuning)


def read_plan(kernel: Kernel, fields: Mapping[str, Any]) -> Plan:
    """From JSON.

    Raises:
        KeyError, TypeError: it is none.
    """
    if kernel == "gluon":
        return GluonMoEPlan(**{**fields, "tuning": GluonMoETuning(**fields["tuning"])})
    return MoEPlan(**{**fields, "tuning": MoETuning(**fields["tuning"])})


def cut_copy(weights: MoEWeights) -> MoEWeights:
    """As the Gluon kernel takes them, the down projections elsewhere in memory; the rest is shared."""
    shared = weights.shared and replace(weights.shared, down=weights.shared.down.clone())
    return cut_down(replace(weights, down=weights.down.clone(), shared=shared), SLICE)


def compile_launch(weights: MoEWeights, tokens: int, plan: Plan, outputs: Sequence[torch.dtype]) -> None:
    """Compile a plan for outputs of these types, without a launch.

    Args:
        weights: not cut; what is in them does not matter.
        tokens: of the batch.
        plan: of the kernel to compile.
        outputs: dtypes.
    """
    from subten.kernels.moe.triton_decode import MoEScratch

    tuning = plan.tuning
    options: dict[str, Any]
    if isinstance(tuning, GluonMoETuning):
        module, weights = module_of("gluon"), cut_down(weights, SLICE)
        options = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True}
    else:
        module = module_of("triton")
        options = {"num_warps": tuning.warps, "maxnreg": tuning.registers, "num_stages": tuning.stages}
    shape, device = MoEShape.of(weights), weights.gate_up.device
    x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    logits = torch.zeros(tokens, shape.num_experts, device=device)
    scratch = MoEScratch.allocate(plan, shape.hidden, device)
    for out in (torch.empty_like(x, dtype=dtype) for dtype in outputs):
        arguments = module.decode_arguments(x, logits, weights, plan, scratch, out)
        module.moe_kernel.warmup(**arguments, **options, grid=(1,))
