"""Compile the kernels before anything is measured, in as many processes as there are cores.

Triton compiles when a kernel is first launched, some seconds for each of dozens of variants, one after the other.
What a process compiles is kept in Triton's cache on disk, where the measuring process then finds it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import torch

from subten.bench.append import measure_append
from subten.bench.attention import AttentionBench, Wanted, variants
from subten.bench.machine import Machine
from subten.bench.shapes import MAIN_CONTEXT, Case, Shape
from subten.bench.timing import Call, Timing
from subten.formats import DEFAULT_FORMAT, PageLayout, get_format

_MAX_PROCESSES = 12
"""Each has a CUDA context and a cache of some gigabytes."""


def nearest_cases(cases: Sequence[Case]) -> list[Case]:
    """Of each shape the shortest context, and the longest up to the main one: what differs from one context to the
    next is how a launch is split, and there is no more to it beyond that."""
    chosen: list[Case] = []
    by_shape = sorted(cases, key=lambda case: (str(case.shape), case.context))
    for _, group in groupby(by_shape, key=lambda case: str(case.shape)):
        of_shape = list(group)
        up_to_main = [case for case in of_shape if case.context <= MAIN_CONTEXT]
        chosen += {of_shape[0]: None, (up_to_main or of_shape)[-1]: None}
    return chosen


def compile_ahead(wanted: Sequence[tuple[Case, Wanted]], appends: Sequence[Shape], machine: Machine) -> str:
    """Launch every variant once, in processes of their own; what came of it, as a line for people.

    Failures are not told here: the measurement meets them again.
    """
    tasks = [
        (case, replace(of_case, formats=[variant.fmt], kernels=[variant.kernel], mean_keys=[variant.mean_key]))
        for case, of_case in wanted
        for fmt in of_case.formats
        for variant in variants(fmt, of_case)
    ]
    count = len(tasks) + len(appends)
    processes = max(1, min(count, os.cpu_count() or 1, _MAX_PROCESSES))
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            jobs = [pool.submit(_launch_append, shape) for shape in appends]
            jobs += [pool.submit(_launch_decode, case, one, machine) for case, one in tasks]
            for job in jobs:
                job.result()
    except BrokenProcessPool:
        return "a process that compiled ahead ended; the rest is compiled as it comes"
    return f"compiled ahead for {count} launches in {processes} processes"


def _launch_decode(case: Case, wanted: Wanted, machine: Machine) -> None:
    with suppress(Exception):
        from subten.kernels.attention.triton_append import append_decode

        device = torch.device("cuda", torch.cuda.current_device())
        bench = AttentionBench(machine, device, with_fa3=False, append=append_decode, timer=_launched)
        for _ in bench.figures(case, PageLayout(wanted.formats[0], case.shape.head_dim), wanted):
            pass


def _launch_append(shape: Shape) -> None:
    with suppress(Exception):
        device = torch.device("cuda", torch.cuda.current_device())
        measure_append(get_format(DEFAULT_FORMAT), shape, device, timer=_launched)


def _launched(calls: Sequence[Call], replays: int) -> Timing:
    """Instead of timing. What is timed together has been launched by the check, one by one."""
    del calls
    return Timing(0.0, 0.0, 0.0, replays)
