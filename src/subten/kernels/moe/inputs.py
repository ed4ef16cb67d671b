"""What a mixture-of-experts kernel is given besides the tokens: the weights and the routing rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RouterSpec:
    """The routing rule: softmax over the expert logits, then the `top_k` most probable experts.

    With `renormalize`, the probabilities of the chosen experts are scaled to sum to one. Taking the top k
    first and the softmax of those logits afterwards, as some families put it, is the same function and so the
    same rule here.
    """

    num_experts: int
    top_k: int
    renormalize: bool


@dataclass(frozen=True)
class SharedExpertWeights:
    """An expert that every token visits, weighted by the sigmoid of a gate of its own (Qwen2-MoE)."""

    gate_up: Tensor
    """[2 * intermediate, hidden]: the gate projection's rows, then the up projection's."""
    down: Tensor
    """[hidden, intermediate]"""
    gate: Tensor
    """[1, hidden]"""


@dataclass(frozen=True)
class MoEWeights:
    """One mixture-of-experts block with E SwiGLU experts."""

    rule: RouterSpec
    router: Tensor
    """[E, hidden]"""
    gate_up: Tensor
    """[E, 2 * intermediate, hidden]: per expert the gate projection's rows, then the up projection's."""
    down: Tensor
    """[E, hidden, intermediate]"""
    shared: SharedExpertWeights | None = None
