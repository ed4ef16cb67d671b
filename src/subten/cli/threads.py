"""How many threads compute on a CPU."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subten.engine import LoadedModel

log = logging.getLogger(__name__)

SMALL = 1 << 28
"""Bytes of weights. One thread decodes models of 139 and of 538 MB as fast as two do, but what prompts gain by two
counts for more with the larger one (benchmarks/results/cpu_threads.json)."""
_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def suit_threads(model: LoadedModel) -> None:
    """One thread for a small model on a CPU, and for others no more than the container may keep busy, unless the
    environment says how many.

    Threads of an operation wait for each other. Where other programs keep the cores busy, each of many small ones
    waits for a turn; where a container has used up its share of a period, all its threads stand still until the next.
    """
    import torch

    from subten.models.weight_bytes import bytes_held

    if model.device.type != "cpu" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    if bytes_held(model.decoder.weights) < SMALL:
        torch.set_num_threads(1)
        log.info("a small model is computed by one thread; OMP_NUM_THREADS asks for more")
        return
    quota = cpu_quota(Path("/"))
    if quota is not None and math.ceil(quota) < torch.get_num_threads():
        torch.set_num_threads(math.ceil(quota))
        log.info("%d threads compute, as this container may keep %g CPUs busy", math.ceil(quota), quota)


def cpu_quota(root: Path) -> float | None:
    """CPUs that the control groups of this process may keep busy; None where they are not limited, or can't be read.

    Version 2 (`cpu.max` of a group and of those it is in) or version 1 (as a container sees its own).

    Args:
        root: of the file system.
    """
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    groups = root / "sys/fs/cgroup"
    own = next((line[3:] for line in _words(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    limits = [_words(groups / group.relative_to("/") / "cpu.max") for group in (Path(own), *Path(own).parents)]
    limits.append([word for name in ("quota", "period") for word in _words(groups / "cpu" / f"cpu.cfs_{name}_us")])
    for limit in limits:
        if len(limit) == 2 and all(word.isdigit() for word in limit):  # Neither `max` nor -1, which are no limits.
            yield int(limit[0]) / int(limit[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []
