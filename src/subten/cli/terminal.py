"""What goes to the terminal: tables, progress, sizes and text that can't take it over."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show(table: Table) -> None:
    """Print a table; into a pipe or file as wide as it needs to be, so that nothing is cut off."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def write_text(text: str) -> None:
    """Write a model's text at once. A terminal gets no control characters: they could change it or its title."""
    sys.stdout.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(line: str) -> None:
    """A line about the work, which is not its result: to stderr."""
    print(line, file=sys.stderr)


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr while a terminal is there to see it; call what it gives with (done, total)."""
    console = Console(stderr=True)
    count: ProgressColumn = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(number_of_bytes: float) -> str:
    """Bytes as people read them: three significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_of_bytes < 1000:
            return f"{number_of_bytes:.3g} {unit}"
        number_of_bytes /= 1024
    return f"{number_of_bytes:.3g} TiB"
