"""What a mixture-of-experts kernel is given besides the tokens: the weights and the routing rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]

SCALE_BLOCK = 128
"""Rows and columns of a weight that share a scale, where scales go by blocks."""


@dataclass(frozen=True)
class RouterSpec:
    """The routing rule: scores from the expert logits, then the `top_k` experts with the highest ones.

    With `renormalize`, the scores of the chosen experts are scaled to sum to one. Taking the top k first and the
    softmax of those logits afterwards, as some families put it, is the same function and so the same rule here.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    scoring: Scoring = "softmax"
    """Softmax over all experts, or the sigmoid of each logit (DeepSeek-V3, GLM-4.5, MiniMax)."""
    factor: float = 1.0
    """On the weights of the chosen experts, after renormalisation."""


@dataclass(frozen=True)
class Experts:
    """E SwiGLU experts of one shape, in 16 bit (or more), or in FP8 (e4m3) with scales.

    Scales are float32, and by output channel or by blocks of 128 x 128 as in the checkpoints of Qwen3 and DeepSeek;
    weights are multiplied by them. Blocks at an edge may be partial: gate and up have blocks of their own.
    """

    gate_up: Tensor
    """[E, 2 * intermediate, hidden]: per expert the gate projection's rows, then the up projection's."""
    down: Tensor
    """[E, hidden, intermediate]; cut into slices (see `packing.cut_down`) [E, slices, hidden, intermediate / slices].
    """
    gate_up_scale: Tensor | None = None
    """[E, 2 * intermediate] or [E, 2 * ceil(intermediate / 128), ceil(hidden / 128)]"""
    down_scale: Tensor | None = None
    """[E, hidden] or [E, ceil(hidden / 128), ceil(intermediate / 128)]"""

    @property
    def intermediate_size(self) -> int:
        """Width of one expert."""
        return self.gate_up.shape[1] // 2

    @property
    def hidden_size(self) -> int:
        """Width of a token."""
        return self.gate_up.shape[2]


@dataclass(frozen=True)
class SharedExpertWeights:
    """An expert that every token visits, weighted by the sigmoid of a gate of its own (Qwen2-MoE) or by one."""

    gate_up: Tensor
    """[2 * intermediate, hidden]: the gate projection's rows, then the up projection's."""
    down: Tensor
    """[hidden, intermediate], or cut into slices"""
    gate: Tensor | None
    """[1, hidden], or None: the weight is one."""
    gate_up_scale: Tensor | None = None
    """As in `Experts`, without the first dimension."""
    down_scale: Tensor | None = None

    @property
    def expert(self) -> Experts:
        """As one of one."""
        scales = (scale if scale is None else scale[None] for scale in (self.gate_up_scale, self.down_scale))
        return Experts(self.gate_up[None], self.down[None], *scales)


@dataclass(frozen=True)
class MoEWeights:
    """One mixture-of-experts block with E SwiGLU experts."""

    rule: RouterSpec
    router: Tensor
    """[E, hidden]"""
    gate_up: Tensor
    """See `Experts`."""
    down: Tensor
    """See `Experts`."""
    shared: SharedExpertWeights | None = None
    gate_up_scale: Tensor | None = None
    """See `Experts`."""
    down_scale: Tensor | None = None
    """See `Experts`."""
    correction: Tensor | None = None
    """float32 [E], added to the scores for the choice only (bias for load balance without a loss, DeepSeek-V3)."""

    @property
    def experts(self) -> Experts:
        """Without router and shared expert."""
        return Experts(self.gate_up, self.down, self.gate_up_scale, self.down_scale)
