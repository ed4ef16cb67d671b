"""How fast this machine's time-stamp counter runs.

A guest under TCG reads the host's counter, and on a board without a timer to compare it with it must be told its
frequency. The kernel tells nobody, so it is measured: 50 ms against the monotonic clock are good to some 10^-5.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Callable

_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret"""
_SECONDS = 0.05
_TRIES = 8


@functools.cache
def counter_khz() -> int:
    """Thousands of ticks a second.

    Raises:
        OSError: this process may not run code that it has written.
    """
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_READ_COUNTER)
        first = ctypes.c_char.from_buffer(page)
        try:
            read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(first))
            began, first_ticks = _moment(read)
            time.sleep(_SECONDS)
            ended, last_ticks = _moment(read)
        finally:
            del first
    return round((last_ticks - first_ticks) * 1e6 / (ended - began))


def _moment(read: Callable[[], int]) -> tuple[int, int]:
    """Clock, in nanoseconds, and counter at one time: of several tries the shortest, as this process may be put aside
    between one and the other."""
    tries = []
    for _ in range(_TRIES):
        before, ticks, after = time.perf_counter_ns(), read(), time.perf_counter_ns()
        tries.append((after - before, before, ticks))
    _, clock, ticks = min(tries)
    return clock, ticks
