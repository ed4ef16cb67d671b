"""How much of a prompt may be computed between two tokens of the streams that are running."""

from __future__ import annotations

_FORGET = 0.1
"""Share by which an estimate follows a measurement below it. One above it is believed at once, as a budget is kept by
the slow steps, not by the mean."""
_SPARE = 0.02
"""Share of a budget that is not planned with: launches and waits take a little longer now and then."""


class Pacer:
    """Divides the time between two decode steps: what the decode step takes, and the rest for layers of prompts.

    A prompt's chunk can't be cut into fewer tokens without changing what it sees of itself, so it is cut by layers:
    some of them, a decode step of the others, the next layers. There is always room left for a chunk's end. At least
    one layer is computed between two decode steps, so that prompts never starve: a budget is kept as long as a decode
    step, one layer of one chunk and its end fit in.

    Args:
        budget: seconds from one token of a stream to the next, or None for whole chunks, one after each decode step.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self._decode = 0.0
        self._layer = 0.0
        self._end = 0.0

    def decoded(self, seconds: float) -> None:
        """Learn how long a decode step took."""
        self._decode = _follow(self._decode, seconds)

    def prefilled(self, layers: int, seconds: float) -> None:
        """Learn how long so many layers of a chunk took."""
        self._layer = _follow(self._layer, seconds / layers)

    def ended(self, seconds: float) -> None:
        """Learn how long it took, behind its last layer, to end a chunk: its tokens are coded, logits computed."""
        self._end = _follow(self._end, seconds)

    def layers(self, elapsed: float) -> int:
        """Layers of a chunk that still fit in, `elapsed` seconds after the latest tokens; 0 or less where none does.

        One, where no layer has been measured yet. Not to be asked without a budget.
        """
        assert self.budget is not None, "there is no budget"
        room = self.budget * (1 - _SPARE) - self._decode - self._end - elapsed
        return int(room / self._layer) if self._layer else 1


def _follow(estimate: float, measured: float) -> float:
    return max(measured, estimate + _FORGET * (measured - estimate))
