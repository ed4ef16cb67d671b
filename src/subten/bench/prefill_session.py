"""One run of the benchmark of prompts: what was asked for, measured, printed and saved row by row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subten.bench import model_shapes
from subten.bench.latency import OUT_OF_TIME, release_memory
from subten.bench.latency_cases import with_moe
from subten.bench.latency_report import profile_lines
from subten.bench.latency_session import load
from subten.bench.machine import describe, first_line, measured_device, product_rate, require_sound_device
from subten.bench.prefill import PrefillBench, PrefillCase, Prefilling, PrefillWishes
from subten.bench.prefill_report import PrefillRow, prefill_line, prefill_table
from subten.bench.recording import Recorder
from subten.bench.shapes import parse_context
from subten.bench.terminal import announce, names, show, token_counts
from subten.errors import ParameterError, SubtenError
from subten.formats import KVFormat, get_format
from subten.outputs import OutputFile

LARGEST_CHUNK = 8192


@dataclass(frozen=True)
class PrefillOptions:
    """What to measure.

    Attributes:
        shapes: names of models.
        formats: of the cache.
        contexts: tokens before the chunk.
        chunk_sizes: tokens of the chunk.
        wishes: what is measured of every case.
        device: where.
        seconds: after which no more cases begin, or None.
    """

    shapes: Sequence[str]
    formats: Sequence[KVFormat]
    contexts: Sequence[int]
    chunk_sizes: Sequence[int]
    wishes: PrefillWishes
    device: str
    seconds: float | None

    @classmethod
    def parse(
        cls,
        models: str,
        *,
        kv: str,
        context: str,
        chunk_size: str,
        chunks: int,
        profile: bool,
        device: str,
        seconds: float | None,
    ) -> PrefillOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names nothing, or something that does not exist.
            ModelNotFoundError: a name that is neither a shape nor a model.
            UnknownFormatError: a name that is no format.
        """
        shapes = model_shapes.chosen_models(models)
        sizes = token_counts("--chunk-size", names(chunk_size), LARGEST_CHUNK)
        contexts = [0 if text == "0" else parse_context(text) for text in names(context)]
        formats = [get_format(name) for name in names(kv)]
        if not (shapes and formats and contexts and sizes):
            raise ParameterError(
                "there is nothing to measure; name a shape, a format, a context and a chunk size at least"
            )
        return cls(shapes, formats, contexts, sizes, PrefillWishes(chunks, profile), device, seconds)


class _Run:
    """Rows as they come."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.rows = recorder, list[PrefillRow]()

    def take(self, row: PrefillRow) -> None:
        """Print a row, keep it, and save all."""
        self.rows.append(row)
        self.recorder.take("\n".join([prefill_line(row), *profile_lines(row.profile)]), prefill=self.rows)


def run_prefill(options: PrefillOptions, json: Path | None, commit: str | None) -> bool:
    """Measure, print and save; whether every row has its figures.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU, or it stopped working.
        StorageError: the file can't be written.
    """
    start = time.monotonic()
    device = measured_device(options.device)
    file = None if json is None else OutputFile(json)
    machine, rate = describe(device, commit), product_rate(device)
    announce(machine)
    print(f"products reach {rate:.1f} TFLOP/s", flush=True)
    run = _Run(Recorder(machine, file, start))
    for shape in options.shapes:
        model = load(shape, "channel", device)
        fused, watched = with_moe(model.loaded, "fused")
        bench = PrefillBench(shape, replace(model, loaded=fused), watched, options.wishes, machine, rate)
        for fmt in options.formats:
            _measure_format(bench, fmt, options, run)
            release_memory(device)
        del model, fused, watched, bench
        release_memory(device)
    show(prefill_table(run.rows, machine))
    return all(row.p50_ms is not None for row in run.rows)


def _measure_format(bench: PrefillBench, fmt: KVFormat, options: PrefillOptions, run: _Run) -> None:
    """Every case of a format becomes a row."""
    cases = [PrefillCase(fmt, context, size) for context in options.contexts for size in options.chunk_sizes]
    room = bench.model.loaded.spec.max_positions
    fitting = [case for case in cases if case.end <= room]

    def give_up(case: PrefillCase, reason: str) -> None:
        run.take(PrefillRow(bench.name, fmt.name, case.context, case.chunk_size, note=reason))

    def reason_of(failure: Exception) -> str:
        if bench.model.loaded.device.type == "cuda":
            require_sound_device(failure)
        return first_line(failure)

    for case in cases:
        if case not in fitting:
            give_up(case, f"{bench.name} takes {room} tokens, not {case.end}")
    if not fitting:
        return
    try:
        prefilling = Prefilling(bench.model, fmt, max(case.end for case in fitting))
    except (SubtenError, RuntimeError) as failure:
        reason = reason_of(failure)
        for case in fitting:
            give_up(case, reason)
        return
    for case in fitting:
        if options.seconds is not None and run.recorder.seconds > options.seconds:
            give_up(case, OUT_OF_TIME)
            continue
        try:
            run.take(bench.measure(prefilling, case))
        except (SubtenError, RuntimeError) as failure:
            give_up(case, reason_of(failure))
