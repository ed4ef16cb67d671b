"""`subten serve` whose steps take 50 ms or more: an answer of hundreds of tokens is under way for half a minute,
however quick the machine is."""

from __future__ import annotations

import sys
import time

from subten.cli import main
from subten.engine.loop import EngineLoop

step = EngineLoop.step


def slow(loop: EngineLoop) -> None:
    time.sleep(0.05)
    step(loop)


if __name__ == "__main__":
    EngineLoop.step = slow  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
