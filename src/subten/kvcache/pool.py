"""Page and window slots with reference counts. Numbers only; storage.py holds the bytes."""

from __future__ import annotations

from collections.abc import Iterable

from subten.errors import CacheMemoryError


class SlotPool:
    """`count` slots that are handed out, shared and given back.

    Args:
        count: number of slots.
        noun: what one slot is called in an error message.
    """

    def __init__(self, count: int, noun: str) -> None:
        self.count = count
        self._noun = noun
        self._references = [0] * count
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def references(self, slot: int) -> int:
        """How many holders a slot has."""
        return self._references[slot]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free slots, each with one reference; all of them or none.

        Raises:
            CacheMemoryError: fewer are free.
        """
        if count > self.free:
            raise CacheMemoryError(
                f"the cache has {self.free} of {self.count} {self._noun}s free where {count} are needed; "
                "give it more memory, a smaller batch or a shorter context"
            )
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
        return slots

    def retain(self, slots: Iterable[int]) -> None:
        """Add one reference to each slot."""
        for slot in slots:
            assert self._references[slot] > 0, f"{self._noun} {slot} is not allocated"
            self._references[slot] += 1

    def release(self, slots: Iterable[int]) -> list[int]:
        """Drop one reference of each slot; return those that became free."""
        freed = []
        for slot in slots:
            assert self._references[slot] > 0, f"{self._noun} {slot} is released twice"
            self._references[slot] -= 1
            if self._references[slot] == 0:
                self._free.append(slot)
                freed.append(slot)
        return freed
