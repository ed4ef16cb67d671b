"""The mixture-of-experts block: router, experts and shared expert as one operation."""

from subten.kernels.moe.inputs import Experts, MoEWeights, RouterSpec, SharedExpertWeights
from subten.kernels.moe.reference import moe_reference
from subten.kernels.moe.router import route

__all__ = ["Experts", "MoEWeights", "RouterSpec", "SharedExpertWeights", "moe_reference", "route"]
