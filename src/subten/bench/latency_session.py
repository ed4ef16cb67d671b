"""One run of the benchmark of decode steps: what was asked for, measured, printed and saved row by row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch

from subten.bench import model_shapes
from subten.bench.latency import OUT_OF_TIME, BenchModel, LatencyBench, missing, release_memory
from subten.bench.latency_ahead import AheadTask, compile_steps_ahead
from subten.bench.latency_cases import BATCHES_TRIED, LatencyCase
from subten.bench.latency_options import LatencyOptions
from subten.bench.latency_report import (
    LargestRow,
    LatencyRow,
    largest_line,
    latency_line,
    latency_table,
    profile_lines,
    read_latency,
)
from subten.bench.machine import Machine, describe, first_line, measured_device, require_sound_device
from subten.bench.random_model import ExpertScales, random_model
from subten.bench.recording import Recorder
from subten.bench.terminal import announce, show
from subten.engine.loading import choose_dtype, load_model
from subten.errors import KernelUnavailableError, ParameterError, SubtenError
from subten.outputs import OutputFile

_AHEAD_SHARE = 0.4
"""Of the time that there is, at most, for compiling ahead."""


_Cache = tuple[str, str, str, int]
_Row = tuple[str, str, str, int, int]


@dataclass
class LatencyResults:
    """What was measured so far, in this run or in one that it goes on with."""

    recorder: Recorder
    rows: dict[_Row, LatencyRow] = field(default_factory=dict)
    largest: dict[_Cache, LargestRow] = field(default_factory=dict)

    def take(self, row: LatencyRow | LargestRow) -> None:
        """Print a row, keep it unless it has no figure and another one does, and save all."""
        if isinstance(row, LatencyRow):
            before = self.rows.get(_row_of(row))
            if row.p50_ms is not None or before is None or before.p50_ms is None:
                self.rows[_row_of(row)] = row
            line = "\n".join([latency_line(row), *profile_lines(row.profile)])
        else:
            self.largest[_cache_of(row)] = row
            line = largest_line(row)
        self.recorder.take(line, latency=list(self.rows.values()), largest=list(self.largest.values()))


def run_latency(options: LatencyOptions, json: Path | None, commit: str | None) -> bool:
    """Measure, print and save; whether every row has its figure.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU.
        ParameterError: there is nothing to resume, or it was measured elsewhere.
        StorageError: the file can't be read or written.
    """
    start = time.monotonic()
    device = measured_device(options.device)
    before = _before(options, json)
    file = None if json is None else OutputFile(json)
    results, left = LatencyResults(Recorder(describe(device, commit), file, start)), list(options.cases)
    if before is not None:
        results = _resumed(before, results)
        left = [case for case in left if not _is_there(case, results, options)]
    announce(results.recorder.machine)
    if options.ahead and device.type == "cuda":
        results.recorder.say(compile_steps_ahead(ahead_tasks(left, options), _part(options.seconds)))
    try:
        for shape, of_shape in groupby(list(left), key=lambda case: case.shape):
            _measure_shape(shape, list(of_shape), options, results, device, left)
            release_memory(device)
    except KernelUnavailableError as failure:  # The device is gone: nothing more can be measured in this process.
        for case in left:
            results.take(missing(case, str(failure)))
    rows = list(results.rows.values())
    show(latency_table(rows, results.recorder.machine))
    return all(row.p50_ms is not None for row in rows)


# --- going on ----------------------------------------------------------------------------------------------------

_Before = tuple[Machine, list[LatencyRow], list[LargestRow]]


def _before(options: LatencyOptions, json: Path | None) -> _Before | None:
    """What is to be gone on with."""
    if not options.resume:
        return None
    if json is None:
        raise ParameterError("--resume goes on with a file; name it with --json")
    return read_latency(json)


def _resumed(before: _Before, results: LatencyResults) -> LatencyResults:
    machine, rows, largest = before
    for name in ("device", "torch", "triton", "driver", "subten", "commit"):
        then, now = getattr(machine, name), getattr(results.recorder.machine, name)
        if then != now:
            raise ParameterError(
                f"--resume: the file's {name} is {then}, and this is {now}; measure into another file"
            )
    return replace(
        results,
        recorder=replace(results.recorder, machine=machine),
        rows={_row_of(row): row for row in rows},
        largest={_cache_of(row): row for row in largest},
    )


def _is_there(case: LatencyCase, results: LatencyResults, options: LatencyOptions) -> bool:
    """Whether it has a figure, of as many steps; and its cache a largest batch, where that is wanted."""
    key, limit = (case.shape, case.moe, case.kv.name, case.context, case.batch), options.wishes.largest_ms
    row, largest = results.rows.get(key), results.largest.get(key[:4])
    if row is None or row.steps is None or row.steps < options.wishes.steps:
        return False
    if case.shape in model_shapes.SHAPES and row.weights != weights_of(options.scales):
        return False
    if options.wishes.profile and row.profile is None:
        return False
    return limit is None or (largest is not None and largest.limit_ms == limit and largest.note != OUT_OF_TIME)


def _row_of(row: LatencyRow) -> _Row:
    return *_cache_of(row), row.batch


def _cache_of(row: LatencyRow | LargestRow) -> _Cache:
    return row.shape, row.moe, row.kv, row.context


# --- measuring ---------------------------------------------------------------------------------------------------


def ahead_tasks(cases: Sequence[LatencyCase], options: LatencyOptions) -> list[AheadTask]:
    """Of every step of a shape that is measured, or tried where its largest batch is looked for. An unfused pipeline
    has few kernels of its own."""
    wishes, steps = options.wishes, dict[LatencyCase, None]()
    for case in cases:
        if case.moe == "fused" and case.shape in model_shapes.SHAPES:
            batches = (case.batch,) if wishes.largest_ms is None else BATCHES_TRIED
            steps |= dict.fromkeys(replace(case, batch=batch) for batch in batches)
    return [AheadTask(step, options.scales, wishes.params, wishes.mean_key) for step in steps]


def _measure_shape(
    shape: str,
    cases: Sequence[LatencyCase],
    options: LatencyOptions,
    results: LatencyResults,
    device: torch.device,
    left: list[LatencyCase],
) -> None:
    """All cases of one model. Those that became rows are taken off `left`."""

    def take(row: LatencyRow | LargestRow) -> None:
        results.take(row)
        if isinstance(row, LatencyRow):
            del left[0]

    def out_of_time() -> bool:
        return options.seconds is not None and results.recorder.seconds > options.seconds

    def give_up(given_up: Sequence[LatencyCase], reason: str) -> None:
        for case in given_up:
            take(missing(case, reason))

    if out_of_time():
        give_up(cases, OUT_OF_TIME)
        return
    try:
        model = load(shape, options.scales, device)
        results.recorder.say(f"{shape} is there")
    except (SubtenError, RuntimeError) as failure:
        if device.type == "cuda":
            require_sound_device(failure)
        give_up(cases, first_line(failure))
        return
    for moe, of_moe in groupby(cases, key=lambda case: case.moe):
        same_experts = list(of_moe)
        try:
            bench = LatencyBench(results.recorder.machine, model, moe, options.wishes, out_of_time)
        except KernelUnavailableError as refusal:
            give_up(same_experts, str(refusal))
            continue
        for _, group in groupby(same_experts, key=lambda case: (case.context, case.kv)):
            same_cache = list(group)
            if out_of_time():
                give_up(same_cache, OUT_OF_TIME)
            else:
                bench.measure(same_cache, take)


def load(name: str, scales: ExpertScales, device: torch.device) -> BenchModel:
    """A shape with random weights, or a model with its own.

    Raises:
        SubtenError: a subclass says why it can't be had.
    """
    if name in model_shapes.SHAPES:
        dtype = choose_dtype("auto", device)
        loaded = random_model(name, model_shapes.SHAPES[name], scales, dtype, device)
        return BenchModel(loaded, weights_of(scales), random=True)
    loaded = load_model(name, device=str(device))
    return BenchModel(loaded, loaded.weights, random=False)


def weights_of(scales: ExpertScales) -> str:
    """See `LatencyRow.weights`, of random ones."""
    return f"fp8 {scales}"


def _part(seconds: float | None) -> float | None:
    return None if seconds is None else _AHEAD_SHARE * seconds
