"""Up to how many tokens of a prompt launches one behind the other take less time than grouped GEMMs: a model of both.

A launch of 64 tokens reads nearly all experts, as they are stored. Grouped GEMMs of torch read them once for all
tokens, but in 16 bit, and experts in FP8 have to be restored for them in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.moe.plan import MoEShape


@dataclass(frozen=True)
class Costs:
    """What takes how long on a GPU; rates are per microsecond.

    Attributes:
        read: bytes that a launch reads of experts.
        launch_us: before and after that.
        launch_products: floating-point operations of a launch, which come on top, its additions into sums with them.
        restored: bytes, at the rate `read`, that are read and written for a weight in FP8 to be one in 16 bit.
        grouped_us: of all other steps around the grouped GEMMs.
        grouped_read: bytes that these read of experts in 16 bit.
        grouped_products: their floating-point operations, beside which they read.
    """

    read: float
    launch_us: float
    launch_products: float
    restored: float
    grouped_us: float
    grouped_read: float
    grouped_products: float


H200 = Costs(
    # Of benchmarks/results/moe_h200.json: a plain read, and what brings 64 tokens of five shapes within 5% in one
    # launch, and within 6% unfused on experts that were restored before.
    read=4.55e6,
    launch_us=8,
    launch_products=240e6,
    grouped_us=95,
    grouped_read=2.75e6,
    # Not measured: a byte read and two written, and what dense products in bf16 reach at best.
    restored=3,
    grouped_products=600e6,
)
"""Other GPUs are taken to compare in the same way."""

_MOST_LAUNCHES = 64
"""That are looked at: 4096 tokens, more than a step has."""


@lru_cache
def most_tokens_in_launches(shape: MoEShape, costs: Costs = H200) -> int:
    """A multiple of 64: beyond it, grouped GEMMs are expected to be faster."""
    launches = 1
    while launches < _MOST_LAUNCHES:
        tokens = (launches + 1) * MOST_TOKENS_OF_A_LAUNCH
        if (launches + 1) * launch_us(shape, costs) > grouped_us(shape, tokens, costs):
            break
        launches += 1
    return launches * MOST_TOKENS_OF_A_LAUNCH


def launch_us(shape: MoEShape, costs: Costs = H200) -> float:
    """Of one launch of 64 tokens."""
    stored = _weights(shape) * (2 if shape.scales == "none" else 1)
    return costs.launch_us + stored / costs.read + _products(shape, MOST_TOKENS_OF_A_LAUNCH) / costs.launch_products


def grouped_us(shape: MoEShape, tokens: int, costs: Costs = H200) -> float:
    """Of all steps by themselves, experts in FP8 restored among them."""
    weights = _weights(shape)
    # Of weights in 16 bit, down projections have to be put together where they are cut: one weight in three.
    moved = costs.restored if shape.scales != "none" else 4 / 3 if shape.cut else 0
    gemms = max(2 * weights / costs.grouped_read, _products(shape, tokens) / costs.grouped_products)
    return costs.grouped_us + moved * weights / costs.read + gemms


def _weights(shape: MoEShape) -> int:
    return 3 * shape.hidden * (shape.num_experts * shape.intermediate + shape.shared)


def _products(shape: MoEShape, tokens: int) -> int:
    """Floating-point operations of all tokens with the experts that they visit."""
    return 6 * shape.hidden * (shape.top_k * shape.intermediate + shape.shared) * tokens
