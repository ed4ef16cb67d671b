"""Bookings of one room."""

import bisect


class Room:
    """Nights are counted as days; a booking is (first day, day of leaving)."""

    def __init__(self):
        self._bookings = []

    def is_free(self, first: int, last: int) -> bool:
        """Whether nobody has any of these nights."""
        for begin, end in self._bookings:
            if begin <= first <= end or begin <= last <= end:
                return False
        return True

    def book(self, first: int, last: int) -> bool:
        """Take the room; False where it is taken."""
        if last < first:
            raise ValueError("a stay ends after it began")
        if not self.is_free(first, last):
            return False
        bisect.insort(self._bookings, (first, last))
        return True

    def nights(self) -> int:
        """How many nights are booked."""
        return sum(end - begin + 1 for begin, end in self._bookings)
