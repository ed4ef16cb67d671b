"""A mixture of experts as an operation of a GPU: one launch for few tokens, grouped GEMMs for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from subten.errors import KernelUnavailableError
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH, in_launches, padded
from subten.kernels.moe.crossover import most_tokens_in_launches
from subten.kernels.moe.gluon_plan import GluonMoEPlan
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.packing import E4M3
from subten.kernels.moe.plan import MoEPlan, MoEShape
from subten.kernels.moe.triton_decode import MoEScratch
from subten.kernels.moe.unfused import moe_unfused

Plan = TypeVar("Plan", MoEPlan, GluonMoEPlan)


class OneLaunchMoE(ABC, Generic[Plan]):
    """``moe(x, weights)``, see `moe_reference`. It keeps plans, and scratch memory per device and hidden size, which
    all layers use in turn: its calls belong on one stream."""

    name: str

    def __init__(self) -> None:
        self._plans: dict[tuple[MoEShape, int, torch.device], Plan] = {}
        self._scratch: dict[tuple[torch.device, int], MoEScratch] = {}

    def __call__(
        self,
        x: Tensor,
        weights: MoEWeights,
        *,
        logits: Tensor | None = None,
        residual: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Up to `MOST_TOKENS_OF_A_LAUNCH` tokens in one launch behind the router's product, up to
        `most_tokens_in_launches` in several, more by grouped GEMMs.

        Raises:
            KernelUnavailableError: the experts are of a kind that the kernel does not serve.
        """
        reason = self.refuse(weights) or _no_fp8(weights)
        if len(x) > MOST_TOKENS_OF_A_LAUNCH:
            if reason is None and len(x) <= most_tokens_in_launches(shape := MoEShape.of(weights)):
                return self._in_launches(x, weights, shape, logits, residual, factor)
            return moe_unfused(x, weights, logits=logits, residual=residual, factor=factor)
        if reason is not None:
            raise KernelUnavailableError(f"the {self.name} kernel does not serve these experts: {reason}")
        if not len(x):
            return torch.empty_like(x)
        return self._in_one(x, weights, MoEShape.of(weights), logits, residual, factor)

    def _in_one(
        self,
        x: Tensor,
        weights: MoEWeights,
        shape: MoEShape,
        logits: Tensor | None,
        residual: Tensor | None,
        factor: float,
    ) -> Tensor:
        plan = self.plan(shape, len(x), x.device)
        return self.launch(x, weights, plan, self._scratch_of(shape, x.device), logits, residual, factor)

    def _in_launches(
        self,
        x: Tensor,
        weights: MoEWeights,
        shape: MoEShape,
        logits: Tensor | None,
        residual: Tensor | None,
        factor: float,
    ) -> Tensor:
        def launch(some: slice) -> Tensor:
            of_some, onto = (None if tensor is None else tensor[some] for tensor in (logits, residual))
            return self._in_one(x[some], weights, shape, of_some, onto, factor)

        return in_launches(launch, len(x))

    @abstractmethod
    def refuse(self, weights: MoEWeights) -> str | None:
        """Why the kernel does not serve such experts, or None."""

    @abstractmethod
    def make_plan(self, shape: MoEShape, tokens: int, device: torch.device) -> Plan:
        """How the launch for up to so many tokens is split."""

    @abstractmethod
    def launch(
        self,
        x: Tensor,
        weights: MoEWeights,
        plan: Plan,
        scratch: MoEScratch,
        logits: Tensor | None,
        residual: Tensor | None,
        factor: float,
    ) -> Tensor:
        """The call of the kernel."""

    def plan(self, shape: MoEShape, tokens: int, device: torch.device) -> Plan:
        """How the launch for so many tokens is split: as that for a few more, lest every number compile a kernel."""
        tokens = padded(tokens)
        key = shape, tokens, device
        if key not in self._plans:
            self._plans[key] = self.make_plan(shape, tokens, device)
        return self._plans[key]

    def _scratch_of(self, shape: MoEShape, device: torch.device) -> MoEScratch:
        key = device, shape.hidden
        if key in self._scratch:
            return self._scratch[key]
        scratch = MoEScratch.allocate(self.plan(shape, MOST_TOKENS_OF_A_LAUNCH, device), shape.hidden, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return scratch  # It lies in the graph's own memory, and is cleared by every replay.
        self._scratch[key] = scratch
        return scratch


def _no_fp8(weights: MoEWeights) -> str | None:
    weight = weights.gate_up
    if weight.dtype == E4M3 and weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return "weights in FP8 need compute capability 8.9 or more"
    return None
