"""How much memory a cache holds, as measured."""

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
