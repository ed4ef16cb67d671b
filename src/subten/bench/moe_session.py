"""One run of the benchmark of mixtures of experts: what was asked for, measured, printed and saved row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from subten.bench.machine import describe, require_gpu
from subten.bench.moe import MoEBench, Tuned, compile_moe_ahead, load_peer, shape_of
from subten.bench.moe_cases import MOST_TOKENS, MoECase, choose_cases
from subten.bench.moe_kernels import Kernel, Variant, variants
from subten.bench.moe_report import MoERow, moe_line, moe_table
from subten.bench.recording import Recorder
from subten.bench.terminal import announce, names, show
from subten.errors import ParameterError
from subten.kernels.moe.plan import Activations, Sums
from subten.outputs import OutputFile


@dataclass(frozen=True)
class MoEOptions:
    """What to measure: every case in every way that it can be computed."""

    cases: Sequence[MoECase]
    kernels: Sequence[Kernel]
    activations: Sequence[Activations]
    sums: Sequence[Sums]
    replays: int

    @classmethod
    def parse(
        cls, *, shapes: str, tokens: str, weights: str, kernels: str, activations: str, sums: str, replays: int
    ) -> MoEOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names something that does not exist.
        """
        for option, text, known in (
            ("--kernels", kernels, get_args(Kernel)),
            ("--activations", activations, get_args(Activations)),
            ("--sums", sums, get_args(Sums)),
        ):
            chosen = names(text)
            if not chosen or not set(chosen) <= set(known):
                raise ParameterError(f"{option} is '{text}'; it takes {', '.join(known)}, separated by commas")
        return cls(
            choose_cases(names(shapes), names(tokens), names(weights), most=MOST_TOKENS),
            [name for name in get_args(Kernel) if name in names(kernels)],
            [name for name in get_args(Activations) if name in names(activations)],
            [name for name in get_args(Sums) if name in names(sums)],
            replays,
        )

    def variants(self, case: MoECase) -> list[Variant]:
        """Of one case."""
        return variants(case, self.kernels, self.activations, self.sums)


def run_moe(
    options: MoEOptions, json: Path | None, peers: Sequence[Path], tuned: Path | None, commit: str | None
) -> bool:
    """Measure, print and save; whether every row has its figure.

    Args:
        options: what to measure.
        json: where to save rows, or None.
        peers: files with other implementations, see `load_peer`.
        tuned: file of tools/tune_moe.py, or None for the default plans.
        commit: of the source, or None to ask git.

    Raises:
        KernelUnavailableError: there is no GPU, or it stopped working.
        StorageError: the file can't be written, or a peer or what was tuned not be loaded.
    """
    device = require_gpu()
    file = None if json is None else OutputFile(json)
    others = dict(map(load_peer, peers))
    plans = Tuned() if tuned is None else Tuned.read(tuned)
    recorder, rows = Recorder(describe(device, commit), file), list[MoERow]()
    machine = recorder.machine
    announce(machine)
    launches = dict.fromkeys(
        (replace(case, tokens=case.launch_tokens), variant)
        for case in options.cases
        for variant in options.variants(case)
        if variant.kernel != "unfused"
    )
    kinds = dict.fromkeys((case.shape, case.weights) for case in options.cases)
    shapes = {kind: shape_of(MoECase(kind[0], 1, kind[1])) for kind in kinds}
    note = compile_moe_ahead(
        [
            (case, plans.plan(case, variant, shapes[case.shape, case.weights], machine.num_sms))
            for case, variant in launches
        ]
    )
    recorder.say(note)
    bench = MoEBench(machine, device, others, options.replays, plans)
    for case in options.cases:
        for row in bench.rows(case, options.variants(case)):
            rows.append(row)
            recorder.take(moe_line(row), moe=rows)
    show(moe_table(rows, machine))
    return all(row.us is not None for row in rows)
