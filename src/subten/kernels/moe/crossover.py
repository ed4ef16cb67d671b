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
        grouped_token_us: of them, for each token.
        grouped_read: bytes that grouped GEMMs read of experts in 16 bit; their products go on beside that.
    """

    read: float
    launch_us: float
    launch_products: float
    restored: float
    grouped_us: float
    grouped_token_us: float
    grouped_read: float


# Of benchmarks/results/moe_prompts_h200.json: what brings five shapes within 5% in launches, and within 14% in
# grouped GEMMs of up to 512 tokens.
H200 = Costs(
    read=4.6e6,
    launch_us=5,
    launch_products=265e6,
    restored=3.45,
    grouped_us=75,
    grouped_token_us=0.3,
    grouped_read=2.75e6,
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
    around = costs.grouped_us + costs.grouped_token_us * tokens
    return around + moved * weights / costs.read + 2 * weights / costs.grouped_read


def _weights(shape: MoEShape) -> int:
    return 3 * shape.hidden * (shape.num_experts * shape.intermediate + shape.shared)


def _products(shape: MoEShape, tokens: int) -> int:
    """Floating-point operations of all tokens with the experts that they visit."""
    return 6 * shape.hidden * (shape.top_k * shape.intermediate + shape.shared) * tokens
