"""How large the cache's two pools are, and what to say when they can't be as large as asked."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from subten.errors import CacheMemoryError, ParameterError
from subten.formats import PAGE_SIZE, CacheGeometry, PageLayout

log = logging.getLogger(__name__)

_SHARE_OF_FREE_MEMORY = 0.8
_SNAPSHOTS_PER_SEQUENCE = 1
_SNAPSHOTS_PER_SESSION = 4
"""At the end of the prompt and of the answer, of the last two turns."""
_SPARE_PAGES_PER_SEQUENCE = 1
"""A fork or snapshot may force one copy of a partly filled page."""


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of the pools, and the longest context that one sequence may have."""

    num_pages: int
    num_windows: int
    max_context: int


def plan_pools(
    layout: PageLayout,
    geometry: CacheGeometry,
    *,
    model_context: int,
    max_context: int | None,
    max_batch: int,
    sessions: int | None,
    cache_bytes: int | None,
    device: torch.device,
) -> PoolSizes:
    """Choose pool sizes.

    Pages for `max_batch` sequences, and for `sessions`, of `max_context` tokens if the budget allows it, else as many
    as fit; at least one sequence of `max_context` tokens must fit. Where `max_context` is not given it is the
    model's, or what fits (then a warning says so).

    Args:
        layout: page layout of the format.
        geometry: the model's cache geometry.
        model_context: positions the model was made for.
        max_context: tokens that one sequence may have, or None.
        max_batch: sequences at a time, 1 or more: `LLM` checks it before it loads a model.
        sessions: conversations whose states are kept while they are idle; None is a snapshot per sequence.
        cache_bytes: memory to use; None is 80% of what is free.
        device: where the cache will live.

    Raises:
        CacheMemoryError: not even one sequence of `max_context` fits; the message says what does.
        ParameterError: the model takes no such `max_context`.
    """
    if max_context is not None and not 1 <= max_context <= model_context:
        raise ParameterError(f"max_context is {max_context}; this model takes 1 to {model_context} tokens")
    budget = int(free_memory(device) * _SHARE_OF_FREE_MEMORY) if cache_bytes is None else cache_bytes
    snapshots = max_batch * _SNAPSHOTS_PER_SEQUENCE if sessions is None else sessions * _SNAPSHOTS_PER_SESSION
    windows = max_batch + snapshots
    num_pages = max(0, budget - windows * layout.window_bytes(geometry)) // layout.page_bytes(geometry)
    fitting = min(model_context, _context_for(num_pages - _SPARE_PAGES_PER_SEQUENCE, layout))
    wanted = max_context or model_context
    if fitting < wanted:
        sentence = (
            f"{layout.format.name} needs {layout.cache_bytes(geometry, wanted) / 2**30:.2f} GiB for a context of "
            f"{wanted} tokens where {budget / 2**30:.2f} GiB may be used for a batch of {max_batch}"
        )
        if max_context is not None or fitting < 1:
            raise CacheMemoryError(f"{sentence}; {fitting} tokens would fit")
        log.warning("%s; the context is limited to %d tokens", sentence, fitting)
        wanted = fitting
    enough = (max_batch + (sessions or 0)) * (layout.pages_for(wanted) + _SPARE_PAGES_PER_SEQUENCE)
    return PoolSizes(min(num_pages, enough), windows, wanted)


def reserved_pages(layout: PageLayout, length: int) -> int:
    """Pages to set aside for a sequence that may grow to `length` tokens."""
    return layout.pages_for(length) + _SPARE_PAGES_PER_SEQUENCE


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            # What is free and what the kernel would give up for it, e.g. cached files.
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _context_for(num_pages: int, layout: PageLayout) -> int:
    """Longest sequence whose coded tokens fit into `num_pages` pages."""
    if num_pages < 0:
        return 0
    fmt = layout.format
    fitting = fmt.sinks + fmt.recent + num_pages * PAGE_SIZE + fmt.granularity - 1
    # What is coded ahead lies in the window still: without one there is nothing, and by the page nothing is.
    return fitting if fmt.granularity > 1 else fitting - min(layout.ahead, fmt.recent)
