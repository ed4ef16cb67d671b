"""Which layers the loss comes from: one layer's cache in a format, all others in 16 bit, and so for every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from subten.engine import LoadedModel
from subten.engine.mixed_cache import MixedCacheScorer
from subten.errors import ContextLengthError, ParameterError
from subten.evals.quality import FormatQuality, measure
from subten.formats import KVFormat


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
