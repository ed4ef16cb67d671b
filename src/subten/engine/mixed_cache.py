"""A cache that is in one format in some layers and in 16 bit in the others: to see where a format's loss comes from.

Two caches, each with an attention of its own: the layers in the format, and the others. What an `LLM` adds (books,
batches, prefixes) plays no part here: a sequence of its own fills pages 0, 1, 2 ... of both.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subten.engine.calibrate import calibration_for
from subten.engine.layer_cache import layer_cache
from subten.engine.loading import LoadedModel
from subten.engine.usage import CacheUsage
from subten.formats import KVFormat, PageLayout, get_format
from subten.kernels.attention import AttentionInputs, Heads, PagedAttention
from subten.kernels.select import Use, select_attention
from subten.kvcache import CacheStorage
from subten.models.decoder import StepInputs

CHUNK_SIZE = 256
"""Tokens per step. Under the `window` rule it makes no difference to the results."""

WIDE_FORMAT = "bf16"
"""Format of the other layers."""


class MixedCacheScorer:
    """Scores texts with a cache that is in `kv` in some layers and in 16 bit in the others.

    Args:
        model: the model.
        kv: the format.
        layers: indices of the layers that are in it.
        context: longest text.
        chunk_size: tokens per step, 1 or more.
    """

    def __init__(
        self, model: LoadedModel, kv: KVFormat, layers: Collection[int], context: int, chunk_size: int = CHUNK_SIZE
    ) -> None:
        self.kv = kv
        self._model = model
        self._chunk_size = chunk_size
        self._length = 0
        geometry, wide = replace(model.geometry, num_layers=1), get_format(WIDE_FORMAT)
        calibration = calibration_for(model) if kv.calibrated and layers else None
        every = range(model.geometry.num_layers)
        self._layouts: dict[int, PageLayout] = {}
        attention: dict[int, tuple[PagedAttention, int]] = {}
        pages = 1
        for fmt, requested in ((kv, model.attention), (wide, None)):
            indices = [index for index in every if (index in layers) == (fmt is kv)]
            if not indices:
                continue
            layout = PageLayout(fmt, geometry.head_dim)
            choice = select_attention(Use(model.device, model.dtype, (layout,)), requested)
            layout = replace(layout, ahead=choice.ahead)
            count = layout.pages_for(context)
            storage = CacheStorage(layout, replace(geometry, num_layers=len(indices)), count, 1, model.device)
            built = choice.load()(
                [
                    layer_cache(model, index, storage.layer(place), layout, calibration)
                    for place, index in enumerate(indices)
                ]
            )
            attention |= {index: (built, place) for place, index in enumerate(indices)}
            self._layouts |= dict.fromkeys(indices, layout)
            pages = max(pages, count)
        self._attention = _ByFormat(attention)
        self._block_table = torch.arange(pages, dtype=torch.int32, device=model.device)[None]

    def score(self, token_ids: Sequence[int], decode_tail: int = 0) -> Generator[Tensor, None, None]:
        """Logits as `LLM.score` gives them, under the `window` rule."""
        prefilled = max(0, len(token_ids) - decode_tail)
        starts = [*range(0, prefilled, self._chunk_size), *range(prefilled, len(token_ids))]
        for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
            self._length = end
            yield self._step(token_ids[start:end], start)

    def cache_usage(self) -> CacheUsage:
        """What the layers of the latest step hold together."""
        geometry = self._model.geometry
        one_layer = replace(geometry, num_layers=1)
        held = sum(layout.cache_bytes(one_layer, self._length) for layout in self._layouts.values())
        elements = geometry.elements(self._length)
        return CacheUsage(self._length, elements, held, 2 * elements)

    @torch.inference_mode()
    def _step(self, token_ids: Sequence[int], start: int) -> Tensor:
        device = self._model.device

        def int32(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        inputs = StepInputs(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.arange(start, start + len(token_ids), device=device),
            attention=AttentionInputs(int32(0, len(token_ids)), int32(start), self._block_table, int32(0)),
        )
        hidden = self._model.decoder.forward(inputs, self._attention)
        self._attention.finish(inputs.attention)
        return self._model.decoder.logits(hidden)


class _ByFormat:
    """`PagedAttention` of layers that belong to different caches: which of them, and as which of its layers."""

    def __init__(self, layers: Mapping[int, tuple[PagedAttention, int]]) -> None:
        self._layers = layers

    def attend(self, layer: int, heads: Heads, inputs: AttentionInputs, scale: float) -> Tensor:
        attention, place = self._layers[layer]
        return attention.attend(place, heads, inputs, scale)

    def finish(self, inputs: AttentionInputs) -> None:
        for attention in {id(attention): attention for attention, _ in self._layers.values()}.values():
            attention.finish(inputs)
