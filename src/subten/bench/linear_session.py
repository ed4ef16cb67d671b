"""One run of the benchmark of linear layers: what was asked for, measured, printed and saved row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subten.bench.linear import LinearBench, compile_linear_ahead
from subten.bench.linear_cases import LinearCase, choose_cases
from subten.bench.linear_report import KERNELS, LinearRow, linear_line, linear_table
from subten.bench.machine import describe, require_gpu
from subten.bench.recording import Recorder
from subten.bench.terminal import announce, names, show
from subten.errors import ParameterError
from subten.outputs import OutputFile


@dataclass(frozen=True)
class LinearOptions:
    """What to measure: every case with every kernel."""

    cases: Sequence[LinearCase]
    kernels: Sequence[str]
    replays: int

    @classmethod
    def parse(cls, *, sizes: str, tokens: str, weights: str, kernels: str, replays: int) -> LinearOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names something that does not exist.
        """
        chosen = names(kernels)
        if not chosen or not set(chosen) <= set(KERNELS):
            raise ParameterError(f"--kernels is '{kernels}'; it takes {', '.join(KERNELS)}, separated by commas")
        return cls(
            choose_cases(names(sizes), names(tokens), names(weights)),
            [name for name in KERNELS if name in chosen],
            replays,
        )


def run_linear(options: LinearOptions, json: Path | None, commit: str | None) -> bool:
    """Measure, print and save; whether every row has its figure.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU, or it stopped working.
        StorageError: the file can't be written.
    """
    device = require_gpu()
    file = None if json is None else OutputFile(json)
    recorder, rows = Recorder(describe(device, commit), file), list[LinearRow]()
    machine = recorder.machine
    announce(machine)
    note = compile_linear_ahead(options.cases, options.kernels, machine.num_sms)
    recorder.say(note)
    bench = LinearBench(machine, device, options.replays)
    for case in options.cases:
        for row in bench.rows(case, options.kernels):
            rows.append(row)
            recorder.take(linear_line(row), linear=rows)
    show(linear_table(rows, machine))
    return all(row.us is not None for row in rows)
