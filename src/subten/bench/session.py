"""One run of the attention benchmark: what was asked for, measured row by row, printed and saved as rows come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from subten.bench.ahead import compile_ahead, nearest_cases
from subten.bench.append import BATCHES, measure_append
from subten.bench.attention import AttentionBench, Wanted
from subten.bench.kernels import KERNELS
from subten.bench.machine import describe, require_gpu
from subten.bench.peers import load_flash_attention_3
from subten.bench.recording import Recorder
from subten.bench.report import (
    AppendRow,
    AttentionRow,
    append_line,
    append_table,
    attention_table,
    crossover_table,
    crossovers,
    row_line,
)
from subten.bench.shapes import MAIN_CONTEXT, Case, Shape, choose, parse_context
from subten.bench.terminal import announce, names, show
from subten.errors import ParameterError
from subten.formats import DEFAULT_FORMAT, KVFormat, get_format
from subten.outputs import OutputFile

_BESIDE = ("kv4", "fp8", "bf16")
"""Measured at the main context too, unless formats were asked for."""


class MeanKeys(StrEnum):
    """Whether scores get the term of a mean key that was taken out before coding."""

    BOTH = "both"
    WITH = "with"
    WITHOUT = "without"

    @property
    def terms(self) -> tuple[bool, ...]:
        """With the term or without."""
        return {MeanKeys.BOTH: (False, True), MeanKeys.WITH: (True,), MeanKeys.WITHOUT: (False,)}[self]


@dataclass(frozen=True)
class AttentionOptions:
    """What to measure.

    Attributes:
        cases: shapes and contexts.
        formats: of every case; empty means the default one, and at the main context some more.
        kernels: by name.
        mean_key: with its term, without, or both.
        quick: whether the default formats are one everywhere.
        append: whether kv_append is measured.
        replays: of a graph.
    """

    cases: Sequence[Case]
    formats: Sequence[KVFormat]
    kernels: Sequence[str]
    mean_key: MeanKeys
    quick: bool
    append: bool
    replays: int

    @classmethod
    def parse(
        cls,
        *,
        rows: str,
        contexts: str,
        formats: str,
        kernels: str,
        mean_key: MeanKeys,
        quick: bool,
        append: bool | None,
        replays: int,
    ) -> AttentionOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names nothing, or something that does not exist.
            UnknownFormatError: a name that is no format.
        """
        chosen = names(kernels)
        unknown = [name for name in chosen if name not in KERNELS]
        if unknown or not chosen:
            raise ParameterError(f"--kernels is '{kernels}'; it takes {' and '.join(KERNELS)}, separated by commas")
        return cls(
            cases=choose(
                [Shape.parse(text) for text in names(rows)],
                [parse_context(text) for text in names(contexts)],
                quick=quick,
            ),
            formats=[get_format(name) for name in names(formats)],
            kernels=chosen,
            mean_key=mean_key,
            quick=quick,
            append=not quick if append is None else append,
            replays=replays,
        )

    def wanted(self, case: Case) -> Wanted:
        """Of one case."""
        beside = _BESIDE if case.context == MAIN_CONTEXT and not self.quick else ()
        formats = self.formats or [get_format(name) for name in (DEFAULT_FORMAT, *beside)]
        return Wanted(formats, self.kernels, self.mean_key.terms, self.replays)


@dataclass
class Results:
    """What was measured so far."""

    recorder: Recorder
    rows: list[AttentionRow] = field(default_factory=list)
    appends: list[AppendRow] = field(default_factory=list)

    def take(self, row: AttentionRow | AppendRow) -> None:
        """Print a row, keep it, and save all."""
        if isinstance(row, AttentionRow):
            self.rows.append(row)
            line = row_line(row)
        else:
            self.appends.append(row)
            line = append_line(row)
        self.recorder.take(line, attention=self.rows, crossover=crossovers(self.rows), kv_append=self.appends)

    @property
    def complete(self) -> bool:
        """Whether every row has its figure."""
        rows: list[AttentionRow | AppendRow] = [*self.rows, *self.appends]
        return all(row.us is not None for row in rows)

    def show(self) -> None:
        """Print the tables."""
        tables = [attention_table(self.rows, self.recorder.machine)]
        found = crossovers(self.rows)
        if found:
            tables.append(crossover_table(found))
        if self.appends:
            tables.append(append_table(self.appends))
        show(*tables)


def run_attention(options: AttentionOptions, json: Path | None, fa3: Path | None, commit: str | None) -> bool:
    """Measure, print and save; whether every row has its figure.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        fa3: folder with the library of FlashAttention-3, or None.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU, it stopped working, or the library does not load.
        StorageError: the file can't be written, or the folder has no library.
    """
    device = require_gpu()
    # What can only run on a GPU is imported here, behind the question whether there is one.
    from subten.kernels.attention.triton_append import append_decode

    file = None if json is None else OutputFile(json)
    if fa3 is not None:
        load_flash_attention_3(fa3)
    results = Results(Recorder(describe(device, commit), file))
    machine = results.recorder.machine
    announce(machine)
    note = compile_ahead(
        [(case, options.wanted(case)) for case in nearest_cases(options.cases)],
        [Shape(batch, 8, 4) for batch in BATCHES] if options.append else [],
        machine,
    )
    results.recorder.say(note)
    bench = AttentionBench(machine, device, fa3 is not None, append_decode)
    if options.append:
        for batch in BATCHES:
            results.take(measure_append(get_format(DEFAULT_FORMAT), Shape(batch, 8, 4), device, options.replays))
    for case in options.cases:
        for row in bench.rows(case, options.wanted(case)):
            results.take(row)
    results.show()
    return results.complete
