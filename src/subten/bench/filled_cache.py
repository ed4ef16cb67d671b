"""The engine's runner over a cache whose bytes are made up, so that nobody has to compute a prompt to have a context.

The books hold the lengths that the bytes stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from subten.bench.caches import coded_pages, fill_storage
from subten.engine.calibrate import Calibration
from subten.engine.layer_cache import layer_cache
from subten.engine.loading import LoadedModel
from subten.engine.memory import free_memory
from subten.engine.runner import Runner
from subten.errors import CacheMemoryError, ContextLengthError
from subten.formats import KVFormat, PageLayout
from subten.kernels.select import Implementation, Use, select_attention
from subten.kvcache import CacheBooks
from subten.kvcache.storage import predicted_bytes

_APPENDED = 4096
"""Tokens that are entered into the books at a time."""
_SHARE_OF_FREE_MEMORY = 0.9
"""For the cache. The rest is for captured graphs and what runs beside them."""


@dataclass(frozen=True)
class CacheKind:
    """What a cache is made for.

    Attributes:
        layout: of its pages, as the kernels that were chosen write them.
        choice: these, of attention.
        context: tokens of the longest sequence.
    """

    layout: PageLayout
    choice: Implementation
    context: int

    @classmethod
    def of(cls, model: LoadedModel, fmt: KVFormat, context: int) -> CacheKind:
        """As an `LLM` chooses.

        Raises:
            ContextLengthError: the model has no positions for so many tokens.
            KernelUnavailableError: no kernel serves the format here.
        """
        if context > model.spec.max_positions:
            raise ContextLengthError(f"{model.name} takes {model.spec.max_positions} tokens, not {context}")
        layout = PageLayout(fmt, model.geometry.head_dim)
        choice = select_attention(Use(model.device, model.dtype, (layout,)), model.attention)
        return cls(replace(layout, ahead=choice.ahead), choice, context)

    @property
    def attention(self) -> str:
        """The name of the choice."""
        return self.choice.name

    def bytes_for(self, model: LoadedModel, batch: int) -> int:
        """Of a cache for so many sequences."""
        return predicted_bytes(self.layout, model.geometry, batch * self.layout.pages_for(self.context), batch)

    def most(self, model: LoadedModel, batches: Sequence[int]) -> int:
        """The largest of these batches for which there is memory now.

        Raises:
            CacheMemoryError: there is none.
        """
        free = free_memory(model.device)
        fitting = [batch for batch in batches if self.bytes_for(model, batch) <= free * _SHARE_OF_FREE_MEMORY]
        if not fitting:
            least = min(batches)
            size = self.bytes_for(model, least) / 2**30
            raise CacheMemoryError(
                f"the cache of {least} such sequences takes {size:.1f} GiB, and {free / 2**30:.1f} are free"
            )
        return max(fitting)


class FilledCache:
    """Sequences of any length up to that of the kind, at once.

    Args:
        model: the model.
        kind: of the cache.
        sequences: that it has room for.
        calibration: how the format codes.

    Raises:
        CacheMemoryError: the device has no room for it.
    """

    def __init__(self, model: LoadedModel, kind: CacheKind, sequences: int, calibration: Calibration | None) -> None:
        layout = kind.layout
        pages = sequences * layout.pages_for(kind.context)
        self.kind = kind
        self.books = CacheBooks(layout, pages, sequences)
        self.runner = Runner(
            model, layout, pages, sequences, calibration, "chunk", kind.choice.load(), sequences, kind.context
        )
        storage = self.runner.storage
        of_layer = layer_cache(model, 0, storage.layer(0), layout, calibration)
        fill_storage(storage, coded_pages(layout, model.geometry.num_kv_heads, of_layer.coding))

    def open(self, length: int) -> int:
        """A new sequence that holds so many tokens; its number in the books."""
        sequence = self.books.open().sequence
        for start in range(0, length, _APPENDED):
            self.books.append(sequence, [0] * min(_APPENDED, length - start))
        return sequence
