"""Processor time of a sandbox, for what a branch cost."""

from __future__ import annotations

import os
from pathlib import Path

from subten.agent.sandbox import Clone


def cpu_seconds(clone: Clone) -> float | None:
    """What the clone's processes have used so far, those that have ended and were waited for included.

    None where the system does not say.
    """
    try:
        ticks = sum(_ticks(process) for process in _family(clone.process_id))
    except (OSError, ValueError, IndexError):
        return None
    return round(ticks / os.sysconf("SC_CLK_TCK"), 3)


def _ticks(process: int) -> int:
    # The second field is a program's name in brackets, in which anything may stand.
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15]))


def _family(process: int) -> list[int]:
    found = [process]
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += _family(int(child))
    return found
