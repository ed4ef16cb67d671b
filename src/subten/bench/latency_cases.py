"""What is measured of whole decode steps, and what such a step must read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from subten.bench.unfused_fp8 import moe_unfused_fp8
from subten.engine.loading import LoadedModel
from subten.errors import KernelUnavailableError
from subten.formats import KVFormat, PageLayout
from subten.kernels.attention.cost import attention_bytes
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH, sizes
from subten.kernels.moe import MoEWeights, route
from subten.kernels.moe.packing import E4M3
from subten.kernels.moe.reference import router_logits
from subten.kernels.moe.unfused import moe_unfused
from subten.models.decoder import Decoder
from subten.models.weight_bytes import bytes_held, bytes_read
from subten.models.weights import pack_experts

MoE = Literal["fused", "unfused"]
"""The kernel that the engine chooses, or the pipeline of several launches."""

BATCHES_TRIED = tuple(sizes(MOST_TOKENS_OF_A_LAUNCH))
"""Where the largest batch is looked for: the numbers of rows that graphs are made for."""
SHORTEST_CONTEXT = 256


@dataclass(frozen=True)
class LatencyCase:
    """One row's problem.

    Attributes:
        shape: name of the model.
        moe: how experts are computed.
        kv: format of the cache.
        context: tokens of a sequence at the last step.
        batch: sequences.
    """

    shape: str
    moe: MoE
    kv: KVFormat
    context: int
    batch: int


_ONE_LAUNCH = ("gluon", "triton")


class WatchedMoE:
    """A mixture of experts that tells how many different experts its tokens visit, while somebody wants to know."""

    def __init__(self, moe: Any) -> None:
        self._moe = moe
        self.watching = False
        self.visited: list[int] = []
        """Of each call, while it was watched."""

    def __call__(self, x: Tensor, weights: MoEWeights, **options: Any) -> Tensor:
        """See `moe_reference`."""
        if self.watching:
            logits = options.get("logits")
            logits = router_logits(x, weights) if logits is None else logits
            chosen, _ = route(logits[:, : weights.rule.num_experts], weights.rule, weights.correction)
            self.visited.append(len(chosen.unique()))
        output: Tensor = self._moe(x, weights, **options)
        return output


def with_moe(model: LoadedModel, moe: MoE) -> tuple[LoadedModel, WatchedMoE]:
    """The same weights with their experts computed in another way, and who watches it. "fused" may put them into
    another form, in place: "unfused" comes first.

    Raises:
        KernelUnavailableError: the engine has no fused kernel for this model on this GPU.
    """
    kernels = model.kernels
    if moe == "fused" and model.device.type == "cuda" and kernels.chosen["moe"] not in _ONE_LAUNCH:
        raise KernelUnavailableError(f"the engine computes these experts with the {kernels.chosen['moe']} kernel")
    watched = WatchedMoE(kernels.moe if moe == "fused" else _unfused)
    kernels = replace(kernels, moe=watched)
    weights = model.decoder.weights
    if moe == "fused":
        weights = pack_experts(weights, kernels.pack_experts)
    return replace(model, kernels=kernels, decoder=Decoder(model.spec, weights, kernels)), watched


def _unfused(x: Tensor, weights: MoEWeights, **options: Any) -> Tensor:
    in_fp8 = x.is_cuda and weights.gate_up.dtype == E4M3
    return moe_unfused_fp8(x, weights, **options) if in_fp8 else moe_unfused(x, weights, **options)


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of all weights."""
    return bytes_held(model.decoder.weights)


def step_bytes(model: LoadedModel, layout: PageLayout, lengths: Sequence[int], visited: Sequence[float]) -> int:
    """Bytes that a decode step has to read at least: every linear layer, norm and router, of the experts those that
    are visited, a row of the embedding per sequence, and the cache as it is held.

    Args:
        model: the model.
        layout: of the cache.
        lengths: tokens that each sequence's query reads, its own included.
        visited: different experts in each layer that has some.
    """
    weights, spec = model.decoder.weights, model.spec
    heads = spec.attention.num_kv_heads
    group = spec.attention.num_heads // heads
    of_layer = partial(attention_bytes, layout, 1, heads, group, mean_key=False)
    of_cache = spec.num_layers * sum(map(of_layer, lengths))
    return bytes_read(weights, visited) + len(lengths) * weights.embedding[0].nbytes + of_cache
