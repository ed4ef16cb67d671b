"""Stop strings in streamed text: nothing of a stop string is ever shown, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes streamed text on up to the first stop string.

    The first is the one that is complete first, and of several that end together the longest, which has
    nothing to do with how the text was cut into pieces. Text that may yet turn out to be the beginning of a
    stop string is held back until it is known not to be.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        """The stop string that was found; from then on no text passes."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """Take the next piece of text; what of all text so far can be shown now."""
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        # What is held back is the longest possible beginning of a match, so a match can't have begun before it.
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text still held back, where generation ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
