"""Compiling kernels before they are measured, in processes of their own: what one of them compiles is in Triton's
cache on disk for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from os import cpu_count

_MAX_PROCESSES = 15


def in_processes(
    launches: Sequence[Callable[[], object]], seconds: float | None = None, what: str = "launches"
) -> str:
    """Call as many of them as are done in so many seconds; what came of it, as a line for people. Failures are not
    told here: the measurement meets them again."""
    processes = max(1, min(len(launches), cpu_count() or 1, _MAX_PROCESSES))
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    jobs = [pool.submit(launch) for launch in launches]
    done, _ = wait(jobs, seconds)
    pool.shutdown(cancel_futures=True)
    return f"compiled ahead for {len(done)} of {len(launches)} {what} in {processes} processes"
