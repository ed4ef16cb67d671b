"""A stand-in for the attention kernels: the torch reference, on what the kernels that append left in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subten.kernels.attention import AttentionInputs, LayerCache, WideTokens
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import SequenceStep
from subten.kernels.attention.triton_append import DecodeQuery
from subten.kernels.attention.triton_paged import TritonPagedAttention


def appended_by_kernels(caches: Sequence[LayerCache]) -> TritonPagedAttention:
    """Appends are kernels, attention is the reference on what they left in the cache."""
    by_place = {cache.pages.data_ptr(): cache for cache in caches}

    def decode(query: DecodeQuery, layer: PagedLayers, inputs: AttentionInputs, scale: float) -> Tensor:
        cache = by_place[layer.pages.data_ptr()]
        wide = tuple(in_windows(cache, step) for step in inputs.sequences)
        return attend_reference(query.q, wide, cache, inputs, scale)

    def prefill(
        q: Tensor, wide: tuple[WideTokens, ...], layer: PagedLayers, inputs: AttentionInputs, scale: float
    ) -> Tensor:
        return attend_reference(q, wide, by_place[layer.pages.data_ptr()], inputs, scale)

    return TritonPagedAttention(caches, decode, prefill)


def in_windows(cache: LayerCache, step: SequenceStep) -> WideTokens:
    """What the windows hold of a sequence once a step's tokens were appended."""
    fmt = cache.layout.format
    held = [*range(min(fmt.sinks, step.length)), *range(fmt.sinks + fmt.coded_tokens(step.length), step.length)]
    slots = [p if p < fmt.sinks else fmt.sinks + (p - fmt.sinks) % fmt.ring_size for p in held]
    keys, values = cache.windows[step.window_slot][:, :, slots].transpose(1, 2)
    return WideTokens(keys, values, torch.tensor(held, dtype=torch.int64))
