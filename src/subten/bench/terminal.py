"""What all benchmarks read from the command line and print in the same way."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from subten.bench.machine import Machine


def names(text: str) -> list[str]:
    """Of a list separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


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
