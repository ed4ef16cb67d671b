"""The cache's memory: two allocations, byte for byte what the accounting says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subten.errors import CacheMemoryError
from subten.formats.layout import PageLayout
from subten.formats.spec import CacheGeometry
from subten.kvcache.plans import CopyPlan


class LayerStorage(NamedTuple):
    """One layer's part: `pages` uint8 [num_pages, num_kv_heads, record_bytes], `windows` wide dtype
    [num_windows, 2, num_kv_heads, window_size, head_dim]; both are views."""

    pages: Tensor
    windows: Tensor


class SavedSequence(NamedTuple):
    """A sequence's bytes outside the cache, in host memory: `pages` uint8 [pages, page_bytes], `windows` one slot."""

    pages: Tensor
    windows: Tensor


class CacheStorage:
    """Pages and windows of all layers.

    A page of all layers and heads is one contiguous row, so that copying or spilling it is one memcpy; a
    layer sees its slice of every row.

    Raises:
        CacheMemoryError: the allocation failed.
    """

    def __init__(
        self,
        layout: PageLayout,
        geometry: CacheGeometry,
        num_pages: int,
        num_windows: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.geometry = geometry
        window_shape = (
            num_windows,
            geometry.num_layers,
            2,
            geometry.num_kv_heads,
            layout.format.window_size,
            geometry.head_dim,
        )
        try:
            self.pages = torch.empty((num_pages, layout.page_bytes(geometry)), dtype=torch.uint8, device=device)
            self.windows = torch.empty(window_shape, dtype=layout.wide_dtype, device=device)
        except RuntimeError as error:
            size = predicted_bytes(layout, geometry, num_pages, num_windows)
            raise CacheMemoryError(
                f"a cache of {size / 2**30:.2f} GiB could not be allocated on {device}; "
                "ask for a shorter context, a smaller batch or a smaller format"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of both allocations."""
        return self.pages.nbytes + self.windows.nbytes

    def layer(self, index: int) -> LayerStorage:
        """Views of one layer."""
        heads, record = self.geometry.num_kv_heads, self.layout.record_bytes
        start = index * heads * record
        pages = self.pages[:, start : start + heads * record].unflatten(1, (heads, record))
        return LayerStorage(pages, self.windows[:, index])

    def apply(self, copies: CopyPlan) -> None:
        """Carry out a plan's copies, in order: a later one may read what an earlier one wrote."""
        for source, destination in copies.pages:
            self.pages[destination].copy_(self.pages[source])
        for source, destination in copies.windows:
            self.windows[destination].copy_(self.windows[source])

    def save(self, pages: Sequence[int], window_slot: int) -> SavedSequence:
        """A copy of a sequence's pages and windows in host memory."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.pages.device)
        return SavedSequence(self.pages[index].to("cpu"), self.windows[window_slot].to("cpu", copy=True))

    def restore(self, saved: SavedSequence, pages: Sequence[int], window_slot: int) -> None:
        """Put back what `save` took, into as many pages and a window slot, which need not be the same ones."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.pages.device)
        self.pages[index] = saved.pages.to(self.pages.device)
        self.windows[window_slot].copy_(saved.windows)


def predicted_bytes(layout: PageLayout, geometry: CacheGeometry, num_pages: int, num_windows: int) -> int:
    """Bytes that `CacheStorage` allocates for these pools."""
    return num_pages * layout.page_bytes(geometry) + num_windows * layout.window_bytes(geometry)
