"""What becomes of other processes, by their ids."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

_WAIT = 30.0


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that has may be listed until somebody asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def require_end(family: Sequence[int]) -> None:
    """Soon none of them runs."""
    deadline = time.monotonic() + _WAIT
    while left := [pid for pid in family if runs(pid)]:
        assert time.monotonic() < deadline, f"these go on: {left}"
        time.sleep(0.05)
