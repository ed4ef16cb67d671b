"""Rows of a benchmark as they come: printed, and all that there are saved."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from subten.bench.machine import Machine
from subten.outputs import OutputFile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def rows_json(machine: Machine, **rows: Sequence[DataclassInstance]) -> bytes:
    """An object with `machine` and these lists; the keys of a row are its fields."""
    content = {"machine": asdict(machine)} | {name: [asdict(row) for row in own] for name, own in rows.items()}
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class Recorder:
    """Says what was measured, and saves it where a file is given.

    Attributes:
        machine: what is measured on.
        file: of all rows, or None.
        start: `time.monotonic` at the beginning.
    """

    machine: Machine
    file: OutputFile | None
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        """A line for people."""
        print(f"[{self.seconds:4.0f} s] {text}", flush=True)

    def take(self, line: str, **rows: Sequence[DataclassInstance]) -> None:
        """Say that there is a row, and save all that there are by now, see `rows_json`."""
        self.say(line)
        if self.file is not None:
            self.file.write(rows_json(self.machine, **rows))
