"""Attention of all layers over one cache by the Triton kernels.

A sequence with one new token is decoded: append, query and RoPE in one launch per layer, attention in one more, and
once per step the launch that codes what leaves next, for all layers. A sequence with more new tokens is a chunk. A
batch of both is cut in two, so that what a sequence gets does not depend on the kind of its companions.

A step that only decodes is known by its shapes. It reads nothing back to the host, and a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import AttentionInputs, Heads, LayerCache
from subten.kernels.attention.triton_append import DecodeQuery, WideBatch, append_chunk, append_decode
from subten.kernels.attention.triton_decode import DECODE
from subten.kernels.attention.triton_encode import encode_leaving
from subten.kernels.attention.triton_heads import norm_and_rotate_rows
from subten.kernels.attention.triton_prefill import attend_prefill

AttendPrefill = Callable[[Tensor, WideBatch, PagedLayers, AttentionInputs, float], Tensor]
"""``attend_prefill(q, wide, layer, inputs, scale)``: of chunks, [tokens, num_heads, head_dim] in q's dtype."""

_KEPT_PLANS = 32
"""Shapes of decode steps whose plan and scratch memory are kept, beside those that a CUDA graph has captured."""


class TritonPagedAttention:
    """`PagedAttention` of device kernels.

    Args:
        caches: of the layers. Layers that share their allocations and their layout, as those of one cache do, are
            coded in one launch.
        decode: attention of a decode step; by default the portable Triton kernel.
        prefill: attention of chunks; by default the Triton kernel.

    Raises:
        KernelUnavailableError: the kernels do not serve a format or head_dim.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        decode: DecodeKernel = DECODE,
        prefill: AttendPrefill = attend_prefill,
    ) -> None:
        self._decode, self._prefill = decode, prefill
        members: dict[object, list[int]] = {}
        for index, cache in enumerate(caches):
            key = cache.layout, cache.pages.untyped_storage().data_ptr(), cache.windows.untyped_storage().data_ptr()
            members.setdefault(key, []).append(index)
        self._groups = [PagedLayers.of([caches[index] for index in group]) for group in members.values()]
        views = {
            index: layers.layer(place)
            for layers, group in zip(self._groups, members.values(), strict=True)
            for place, index in enumerate(group)
        }
        self._layers = [views[index] for index in range(len(caches))]
        self._decoded: AttentionInputs | None = None  # of the step that `attend` is in
        self._prepared: dict[tuple[object, ...], tuple[Any, Any]] = {}
        self._captured: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def attend(self, layer: int, heads: Heads, inputs: AttentionInputs, scale: float) -> Tensor:
        """See `PagedAttention.attend`."""
        of_layer = self._layers[layer]
        # Every sequence has one token at least: as many tokens as sequences are one for each.
        if len(heads.q) == len(inputs.context_len):
            self._decoded = inputs
            return self._attend_decode(heads, of_layer, inputs, scale)
        decoding, chunks = inputs.parts
        if not len(decoding.rows):
            self._decoded = None
            return self._attend_chunks(heads, of_layer, inputs, scale)
        self._decoded = decoding.inputs
        out = heads.q.new_empty(heads.q.shape)
        out[decoding.rows] = self._attend_decode(heads.of(decoding.rows), of_layer, decoding.inputs, scale)
        out[chunks.rows] = self._attend_chunks(heads.of(chunks.rows), of_layer, chunks.inputs, scale)
        return out

    def finish(self, inputs: AttentionInputs) -> None:  # noqa: ARG002
        """Code what leaves the windows of decoded sequences next. Chunks have coded theirs already."""
        for layers in self._groups:
            # Where no window holds tokens back, `append_decode` has coded the step's own.
            if self._decoded is not None and layers.layout.format.recent:
                encode_leaving(layers, self._decoded)

    def _attend_decode(self, heads: Heads, layer: PagedLayers, inputs: AttentionInputs, scale: float) -> Tensor:
        query = append_decode(
            heads.q,
            heads.k,
            heads.v,
            layer,
            inputs,
            norm=heads.norm,
            rope=heads.rope,
            integer=self._decode.integer_query,
        )
        return self._decode.attend(query, layer, inputs, scale, *self._plan(query, layer, inputs))

    def _plan(self, query: DecodeQuery, layer: PagedLayers, inputs: AttentionInputs) -> tuple[Any, Any]:
        """Plan and scratch of a decode step: one for sequences of up to twice the pages, so that few are needed, and
        the same for the steps in which a sequence grows. What a graph has captured lives as long as the attention."""
        max_pages = 1 << (inputs.block_table.shape[1] - 1).bit_length()
        key = layer.layout, query.q.shape, max_pages, layer.tables.mean is None
        if key in self._captured:
            return self._captured[key]
        if key not in self._prepared:
            if len(self._prepared) == _KEPT_PLANS:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[key] = self._decode.prepare(query, layer, max_pages)
        if query.q.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured[key] = self._prepared.pop(key)
            return self._captured[key]
        return self._prepared[key]

    def _attend_chunks(self, heads: Heads, layer: PagedLayers, inputs: AttentionInputs, scale: float) -> Tensor:
        q, k = norm_and_rotate_rows(heads.q, heads.k, heads.positions, heads.norm, heads.rope)
        wide = append_chunk(k, heads.v, layer, inputs)
        return self._prefill(q, wide, layer, inputs, scale)
