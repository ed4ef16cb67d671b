"""What the books decide and the runner carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CopyPlan:
    """Byte copies to make before a step: (source, destination) page and window slots."""

    pages: tuple[tuple[int, int], ...] = ()
    windows: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: CopyPlan) -> CopyPlan:
        return CopyPlan(self.pages + other.pages, self.windows + other.windows)


@dataclass(frozen=True)
class AppendPlan:
    """One sequence's part of the next step.

    Attributes:
        context_len: tokens in the cache before the step.
        new_tokens: tokens that the step appends.
        block_table: the sequence's pages, room for the step's tokens included; as long as nothing is appended to it
            after this.
        window_slot: the sequence's slot in the 16-bit windows.
        copies: copies to make first (a partly filled page that was shared).
    """

    context_len: int
    new_tokens: int
    block_table: Sequence[int]
    window_slot: int
    copies: CopyPlan
