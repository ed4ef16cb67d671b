"""How many kernels Triton has compiled (or read from its files) and how often memory was asked for: never, once an
engine is warm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class _Compilations:
    """Counts from when it is made on, for as long as the process lives."""

    def __init__(self) -> None:
        from triton import knobs

        self.count = 0
        before = knobs.compilation.listener

        def listener(**compiled: Any) -> None:
            self.count += 1
            if before is not None:
                before(**compiled)

        # Not a hook of the runtime: Triton writes constants down as JSON for these, and ours are dataclasses.
        knobs.compilation.listener = listener


_compilations = cache(_Compilations)


def count_compilations(device: torch.device) -> Callable[[], int]:
    """Begin to count.

    Args:
        device: where the kernels run. On a CPU nothing is compiled, and Triton need not be there.

    Returns:
        What tells how many kernels the process has compiled since.
    """
    if device.type != "cuda":
        return lambda: 0
    compilations = _compilations()
    before = compilations.count
    return lambda: compilations.count - before


def count_allocations(device: torch.device) -> Callable[[], int]:
    """Begin to count.

    Args:
        device: whose memory. Of a CPU's nobody keeps count.

    Returns:
        What tells how often torch has asked the device for memory since; what it has already been given and hands
        out again does not count.
    """

    def asked() -> int:
        return int(torch.cuda.memory_stats(device)["num_device_alloc"]) if device.type == "cuda" else 0

    before = asked()
    return lambda: asked() - before
