"""An engine that takes a few steps and then waits: what a test does to an answer it does before the answer's end,
however quick the machine is and slow the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from subten.engine.loop import EngineLoop


class Steps:
    """So many steps, counted down; more of them on demand."""

    def __init__(self, count: int) -> None:
        self._left = threading.Semaphore(count)

    def more(self, count: int) -> None:
        """Let the engine take further steps."""
        self._left.release(count)

    def taken(self) -> bool:
        """Whether there is one left, which then is taken. Waits for a moment, not for long: what is asked of the
        engine is done between two steps, also where none is taken."""
        return self._left.acquire(timeout=0.001)


@contextmanager
def few_steps(loop: EngineLoop, count: int) -> Iterator[Steps]:
    """Inside the block the engine takes so many steps, and then none until it may take more; behind it as many as it
    likes. To be entered before the answer begins."""
    steps, step = Steps(count), loop.step

    def limited() -> None:
        if steps.taken():
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step", limited)
        yield steps
