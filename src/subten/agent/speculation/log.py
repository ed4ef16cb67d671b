"""The log of a run in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from subten.agent.speculation.events import BranchStarted, Event, RunStarted, from_json, to_json
from subten.agent.speculation.tree import Tree, after
from subten.errors import ParameterError, StorageError


class EventLog:
    """Writes events to a file, each at once, so that a run that was killed has left all that happened.

    What was in the file before goes with the first event: a run that never begins leaves it as it was.

    Raises:
        StorageError: the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = False
        try:
            self._file = path.open("a", encoding="ascii")
        except OSError as error:
            raise StorageError(f"{path} can't be written: {error.strerror or error}") from error

    def write(self, event: Event) -> None:
        """Append one.

        Raises:
            StorageError: it can't be written.
        """
        try:
            if not self._begun:
                self._begun = True
                with contextlib.suppress(OSError):  # a pipe or a terminal has nothing to lose
                    self._file.truncate(0)
            self._file.write(f"{to_json(event)}\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self._path} can't be written: {error.strerror or error}") from error

    def close(self) -> None:
        """No more events. Twice is once."""
        # What is left to be written is what could not be: `write` has said so.
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_log(path: Path) -> list[Event]:
    """The events of a file. A last line without its end is left out: the run was killed while it was written.

    Raises:
        StorageError: the file can't be read, or a line is no event; with the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    events: list[Event] = []
    known: set[int] = set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            event = from_json(line.decode("ascii"))
            _require_order(event, number == 1, known)
        except UnicodeDecodeError as error:
            raise StorageError(f"{path}:{number} is no event of a run: it is not ASCII text") from error
        except ParameterError as error:
            raise StorageError(f"{path}:{number} is no event of a run: {error}") from error
        events.append(event)
    if not events:
        raise StorageError(f"{path} holds no events; a log begins with run_started")
    return events


def _require_order(event: Event, first: bool, known: set[int]) -> None:
    """What `tree.after` relies on: one beginning, and branches that have begun."""
    if first != isinstance(event, RunStarted):
        raise ParameterError("a log begins with its only run_started")
    relied_on = event.parent if isinstance(event, BranchStarted) else getattr(event, "branch", None)
    if relied_on is not None and relied_on not in known:
        raise ParameterError(f"branch {relied_on} has not begun")
    if isinstance(event, BranchStarted):
        known.add(event.branch)


def replay(path: Path) -> Iterator[tuple[Event, Tree]]:
    """The events of a file, each with the state after it.

    Raises:
        StorageError: as `read_log`.
    """
    tree = Tree()
    for event in read_log(path):
        tree = after(tree, event)
        yield event, tree
