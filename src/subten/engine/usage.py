"""How much memory a cache holds, and how busy an engine is, as measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheUsage:
    """What the sequences of a step held.

    Attributes:
        tokens: their lengths together.
        elements: elements of K and V of these tokens.
        held_bytes: bytes of their pages and windows, measured as allocated.
        wide_bytes: what the same elements take in 16 bit.
    """

    tokens: int
    elements: int
    held_bytes: int
    wide_bytes: int

    @property
    def bits_per_element(self) -> float:
        """Measured bits per element, windows and unfilled page slots included; 0 where nothing is held."""
        return 8 * self.held_bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment.

    Attributes:
        running: requests that have a part of the cache.
        waiting: requests that have none yet, or none for now.
        preemptions: times, so far, that a running request's part was taken for an older one.
        pages: pages of the cache.
        available_pages: those that are free, or held by snapshots alone.
        snapshots: states at the end of prompts and answers that are kept for prompts which continue them.
        cache: what the running sequences hold, or the last ones that ran.
        graphs: CUDA graphs that decode steps are launched with; 0 where they are launched kernel by kernel.
        compilations: kernels that the process has compiled since the engine was ready.
        device_allocations: times that the process has asked the GPU for memory since the engine was ready.
    """

    running: int
    waiting: int
    preemptions: int
    pages: int
    available_pages: int
    snapshots: int
    cache: CacheUsage
    graphs: int
    compilations: int
    device_allocations: int
