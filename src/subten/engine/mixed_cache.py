"""A cache that is in one format in some layers and in 16 bit in the others: to see where a format's loss comes from.

The attention operations take each layer's cache with its own page layout, so layers need not be alike to them. What
an `LLM` adds (books, batches, prefixes) plays no part here: a sequence of its own fills pages 0, 1, 2 ...
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subten.engine.calibrate import calibration_for
from subten.engine.layer_cache import layer_cache
from subten.engine.loading import LoadedModel
from subten.engine.usage import CacheUsage
from subten.formats import KVFormat, PageLayout, get_format
from subten.kernels.attention import AttentionInputs
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
        self._caches, pages = [], 1
        for index in range(model.geometry.num_layers):
            layout = PageLayout(kv if index in layers else wide, geometry.head_dim)
            count = layout.pages_for(context)
            memory = CacheStorage(layout, geometry, count, 1, model.device).layer(0)
            self._caches.append(layer_cache(model, index, memory, layout, calibration))
            pages = max(pages, count)
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
        held = sum(cache.layout.cache_bytes(one_layer, self._length) for cache in self._caches)
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
        return self._model.decoder.logits(self._model.decoder.forward(inputs, self._caches))
