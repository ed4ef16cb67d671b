"""Which layers the loss comes from: one layer's cache in a format, all others in 16 bit, and so for every layer.

The attention operations take each layer's cache with its own page layout, so layers need not be alike to them. What
an engine adds (books, batches, prefixes) plays no part here: a sequence of its own fills pages 0, 1, 2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subten.engine import CacheUsage, LoadedModel
from subten.engine.calibrate import calibration_for
from subten.errors import ContextLengthError, ParameterError
from subten.evals.quality import REFERENCE_FORMAT, FormatQuality, measure
from subten.formats import KVFormat, PageLayout, get_format
from subten.formats.coding import uncalibrated_coding
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey
from subten.kvcache import CacheStorage
from subten.models.decoder import StepInputs

CHUNK_SIZE = 256
"""Tokens per step. Under the `window` rule it makes no difference to the results."""


def measure_layers(
    model: LoadedModel,
    kv: KVFormat,
    windows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[FormatQuality]:
    """Compare a cache that is in a format in one layer only with one in 16 bit, under the `window` rule.

    Args:
        model: the model.
        kv: the format.
        windows: token ids of each window.
        progress: called with (done, total), counted in tokens of all runs.

    Returns:
        One result per layer, and one with all layers in the format.

    Raises:
        ContextLengthError: the windows are longer than the model's context.
        NumericalError: a run gave logits that are not finite.
        ParameterError: a format that codes nothing.
    """
    if kv.lossless:
        raise ParameterError(f"{kv.name} codes nothing, so no layer loses anything; choose a format that does")
    context = max(len(window) for window in windows)
    if context > model.spec.max_positions:
        raise ContextLengthError(f"context is {context}; this model takes up to {model.spec.max_positions} tokens")
    every = range(model.geometry.num_layers)
    none, *runs = (MixedCacheScorer(model, kv, layers, context) for layers in ((), *([i] for i in every), every))
    return measure(none, runs, windows, 0, progress)


class MixedCacheScorer:
    """A model whose cache is in `kv` in some layers and in 16 bit in the others; a `Scorer`.

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
        wide = get_format(REFERENCE_FORMAT)
        layouts = [
            PageLayout(kv if index in layers else wide, model.geometry.head_dim)
            for index in range(model.geometry.num_layers)
        ]
        self._caches = [_layer_cache(model, index, layout, context) for index, layout in enumerate(layouts)]
        pages = max(1, *(layout.pages_for(context) for layout in layouts))
        self._block_table = torch.arange(pages, dtype=torch.int32, device=model.device)[None]

    def score(self, token_ids: Sequence[int], decode_tail: int = 0) -> Generator[Tensor, None, None]:
        """Logits of the serving path, as `LLM.score`."""
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


def _layer_cache(model: LoadedModel, index: int, layout: PageLayout, context: int) -> LayerCache:
    """The cache of one layer, with room for one sequence."""
    geometry, fmt = replace(model.geometry, num_layers=1), layout.format
    storage = CacheStorage(layout, geometry, layout.pages_for(context), 1, model.device).layer(0)
    if not fmt.calibrated:
        none_kept = torch.zeros(geometry.num_kv_heads, 0, dtype=torch.int64, device=model.device)
        return LayerCache(*storage, uncalibrated_coding(fmt, geometry.head_dim, none_kept), None, layout)
    calibration = calibration_for(model)
    removed = calibration.removed_mean(index, fmt)
    mean_key = None if removed is None else MeanKey(removed.to(model.device), model.decoder.rope)
    return LayerCache(*storage, calibration.coding(index, fmt, model), mean_key, layout)
