"""What all benchmarks read from the command line and print in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from subten.bench.machine import Machine
from subten.errors import ParameterError


def names(text: str) -> list[str]:
    """Of a list separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def token_counts(option: str, texts: Sequence[str], most: int) -> list[int]:
    """Numbers of tokens from the command line.

    Raises:
        ParameterError: one is no number from 1 to `most`.
    """
    bad = [text for text in texts if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most]
    if bad:
        raise ParameterError(f"{option} has '{bad[0]}'; it takes numbers from 1 to {most}, separated by commas")
    return [int(text) for text in texts]


def number(x: float | None, spec: str) -> str:
    """A figure in this format; "-" where there is none."""
    return "-" if x is None else f"{x:{spec}}"


def new_table(title: str, caption: str | None, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of names, then columns of numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def machine_table(
    machine: Machine, caption: str, notes: Iterable[str | None], names: Sequence[str], numbers: Sequence[str]
) -> Table:
    """Likewise, under what was measured on and above what there is to be said of its rows."""
    title = (
        f"{machine.device}, torch {machine.torch}, Triton {machine.triton}; reads {machine.read_tb_per_s:.2f} TB/s"
    )
    return new_table(title, f"{caption} {'; '.join(sorted({note for note in notes if note}))}", names, numbers)


def announce(machine: Machine) -> None:
    """What is measured on."""
    print(f"{machine.device} reads {machine.read_tb_per_s:.2f} TB/s; source {machine.commit}", flush=True)


def show(*tables: Table) -> None:
    """Print tables; into a pipe or file as wide as they need to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for table in tables:
        console.print(table)
