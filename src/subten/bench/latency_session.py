"""One run of the benchmark of decode steps: what was asked for, measured, printed and saved row by row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

import torch

from subten.bench import model_shapes
from subten.bench.latency import BenchModel, LatencyBench, StepWishes, missing, release_memory
from subten.bench.latency_ahead import AheadTask, compile_steps_ahead
from subten.bench.latency_cases import BATCHES_TRIED, SHORTEST_CONTEXT, LatencyCase, MoE
from subten.bench.latency_report import (
    LargestRow,
    LatencyRow,
    largest_line,
    latency_json,
    latency_line,
    latency_table,
    profile_lines,
)
from subten.bench.machine import Machine, describe, first_line, require_gpu, require_sound_device
from subten.bench.random_model import ExpertScales, random_model
from subten.bench.report import ResultFile
from subten.bench.shapes import parse_context
from subten.bench.terminal import announce, names, show
from subten.checkpoints import resolve_model
from subten.engine.loading import choose_device, choose_dtype, load_model
from subten.engine.sampling import SamplingParams
from subten.errors import KernelUnavailableError, ParameterError, SubtenError
from subten.formats import KVFormat, get_format

_AHEAD_SHARE = 0.4
"""Of the time that there is, at most, for compiling ahead."""


@dataclass(frozen=True)
class LatencyOptions:
    """What to measure.

    Attributes:
        cases: in the order in which they are measured; those that share a model, and then those that share a cache,
            are neighbours.
        wishes: what is measured of every case.
        scales: of the experts of random models.
        device: where.
        seconds: after which no more cases begin, or None.
        ahead: whether kernels are compiled ahead.
    """

    cases: Sequence[LatencyCase]
    wishes: StepWishes
    scales: ExpertScales
    device: str
    seconds: float | None
    ahead: bool

    @classmethod
    def parse(
        cls,
        models: str,
        *,
        batch: str,
        context: str,
        kv: str,
        moe: str,
        steps: int,
        largest: float | None,
        experts: str,
        temperature: float,
        top_p: float,
        mean_key: bool,
        profile: bool,
        device: str,
        seconds: float | None,
        ahead: bool,
    ) -> LatencyOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names nothing, or something that does not exist.
            ModelNotFoundError: a name that is neither a shape nor a model.
            UnknownFormatError: a name that is no format.
        """
        shapes = names(models)
        for name in shapes:
            if name not in model_shapes.SHAPES:
                resolve_model(name)
        kinds, scales, contexts = names(moe), experts.strip(), [parse_context(text) for text in names(context)]
        if not kinds or not set(kinds) <= set(get_args(MoE)):
            raise ParameterError(f"--moe is '{moe}'; it takes {' and '.join(get_args(MoE))}, separated by commas")
        if scales not in get_args(ExpertScales):
            raise ParameterError(f"--experts is '{experts}'; it is one of {', '.join(get_args(ExpertScales))}")
        bad = [text for text in names(batch) if text not in map(str, BATCHES_TRIED)]
        if bad:
            sizes = ", ".join(map(str, BATCHES_TRIED))
            raise ParameterError(f"--batch has '{bad[0]}'; it takes the sizes that graphs are made for: {sizes}")
        if any(tokens < SHORTEST_CONTEXT for tokens in contexts):
            raise ParameterError(f"--context has {min(contexts)} tokens; it takes {SHORTEST_CONTEXT} or more")
        batches, formats = sorted(map(int, names(batch))), [get_format(name) for name in names(kv)]
        cases = [
            LatencyCase(shape, cast("MoE", kind), fmt, tokens, size)
            for shape in shapes
            for kind in sorted(kinds, reverse=True)  # "unfused" first, see `with_moe`
            for tokens in contexts
            for fmt in formats
            for size in batches
        ]
        if not cases:
            raise ParameterError(
                "there is nothing to measure; name a shape, a batch, a context and a format at least"
            )
        wishes = StepWishes(steps, SamplingParams(temperature=temperature, top_p=top_p), mean_key, profile, largest)
        return cls(cases, wishes, cast("ExpertScales", scales), device, seconds, ahead)


@dataclass
class LatencyResults:
    """What was measured so far."""

    machine: Machine
    file: ResultFile | None
    start: float
    rows: list[LatencyRow] = field(default_factory=list)
    largest: list[LargestRow] = field(default_factory=list)

    def take(self, row: LatencyRow | LargestRow) -> None:
        """Print a row, keep it, and save all."""
        seconds = time.monotonic() - self.start
        if isinstance(row, LatencyRow):
            self.rows.append(row)
            print("\n".join([latency_line(row, seconds), *profile_lines(row)]), flush=True)
        else:
            self.largest.append(row)
            print(largest_line(row, seconds), flush=True)
        if self.file is not None:
            self.file.write(latency_json(self.machine, self.rows, self.largest))

    def say(self, text: str) -> None:
        """A line for people."""
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)


def run_latency(options: LatencyOptions, json: Path | None, commit: str | None) -> bool:
    """Measure, print and save; whether every row has its figure.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU.
        StorageError: the file can't be written.
    """
    start = time.monotonic()
    device = require_gpu() if options.device in ("auto", "cuda") else choose_device(options.device)
    file = None if json is None else ResultFile(json)
    results = LatencyResults(describe(device, commit), file, start)
    announce(results.machine)
    if options.ahead and device.type == "cuda":
        results.say(compile_steps_ahead(ahead_tasks(options), _part(options.seconds)))
    left = list(options.cases)
    try:
        for shape, of_shape in groupby(options.cases, key=lambda case: case.shape):
            _measure_shape(shape, list(of_shape), options, results, device, left)
            release_memory(device)
    except KernelUnavailableError as failure:  # The device is gone: nothing more can be measured in this process.
        for case in left:
            results.take(missing(case, str(failure)))
    show(latency_table(results.rows, results.machine))
    return all(row.p50_ms is not None for row in results.rows)


def ahead_tasks(options: LatencyOptions) -> list[AheadTask]:
    """Of every cache of a shape, and of all numbers of rows that it has graphs for: up to its largest batch, or up to
    the largest that is tried. An unfused pipeline has few kernels of its own."""
    wishes, largest = options.wishes, dict[tuple[str, MoE, KVFormat, int], int]()
    for case in options.cases:
        if case.moe == "fused" and case.shape in model_shapes.SHAPES:
            key = case.shape, case.moe, case.kv, case.context
            most = case.batch if wishes.largest_ms is None else BATCHES_TRIED[-1]
            largest[key] = max(most, largest.get(key, 0))
    return [
        AheadTask(LatencyCase(*key, batch), options.scales, wishes.params, wishes.mean_key)
        for key, most in largest.items()
        for batch in BATCHES_TRIED
        if batch <= most
    ]


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
        return options.seconds is not None and time.monotonic() - results.start > options.seconds

    def give_up(given_up: Sequence[LatencyCase], reason: str) -> None:
        for case in given_up:
            take(missing(case, reason))

    if out_of_time():
        give_up(cases, "the time was over")
        return
    try:
        model = load(shape, options.scales, device)
        results.say(f"{shape} is there")
    except (SubtenError, RuntimeError) as failure:
        if device.type == "cuda":
            require_sound_device(failure)
        give_up(cases, first_line(failure))
        return
    for moe, of_moe in groupby(cases, key=lambda case: case.moe):
        same_experts = list(of_moe)
        try:
            bench = LatencyBench(results.machine, model, moe, options.wishes, out_of_time)
        except KernelUnavailableError as refusal:
            give_up(same_experts, str(refusal))
            continue
        for _, group in groupby(same_experts, key=lambda case: (case.context, case.kv)):
            same_cache = list(group)
            if out_of_time():
                give_up(same_cache, "the time was over")
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
        return BenchModel(loaded, f"fp8 {scales}", random=True)
    loaded = load_model(name, device=str(device))
    return BenchModel(loaded, loaded.weights, random=False)


def _part(seconds: float | None) -> float | None:
    return None if seconds is None else _AHEAD_SHARE * seconds
