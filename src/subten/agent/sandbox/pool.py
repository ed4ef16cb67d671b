"""Clones kept ready, so that taking one costs no start.

Each has run a command before it is handed out. Under TCG that is most of the time until a clone's first output: by
then the guest's kernel, its agent and its shell are translated.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Self

from subten.agent.sandbox.interface import Clone, Template
from subten.errors import ParameterError, SandboxError

MOST_CLONES = 64
"""Of a pool, and plans at a time. A microVM that has run one command takes some 90 MiB and may grow to all of its
memory; a pool keeps as many ready as are in use. A model's server gets as many requests at once."""


def require_clones(name: str, count: int) -> None:
    """Check a number of clones.

    Raises:
        ParameterError: it is not 1 to `MOST_CLONES`.
    """
    if not 1 <= count <= MOST_CLONES:
        raise ParameterError(
            f"{name} is {count}; it must be 1 to {MOST_CLONES}, as each takes the memory of a sandbox"
        )


class Pool:
    """Some clones of one template, replaced in the background as they are taken. Safe to use from several threads."""

    def __init__(self, template: Template, size: int) -> None:
        """Begin to start clones.

        Args:
            template: what they are clones of; it must outlive the pool.
            size: how many are kept ready, 1 to `MOST_CLONES`.

        Raises:
            ParameterError: it is another size.
        """
        require_clones("the size of a pool", size)
        self._template = template
        self._size = size
        self._ready: deque[Clone] = deque()
        self._failure: SandboxError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._filler = threading.Thread(target=self._fill, name="subten-pool", daemon=True)
        self._filler.start()

    def take(self) -> Clone:
        """A clone that belongs to the caller, who ends it: its clock set now, its randomness and name its own.

        Waits where none is ready.

        Raises:
            SandboxError: the pool was closed, or clones can't be started.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
                if self._closed:
                    raise SandboxError("the pool was closed; it hands out no more clones")
                if not self._ready:
                    failure, self._failure = self._failure, None
                    self._changed.notify_all()
                    assert failure is not None
                    raise failure
                clone = self._ready.popleft()
                self._changed.notify_all()
            try:
                clone.refresh()
            except SandboxError:
                continue  # it died while it waited
            return clone

    def wait(self) -> None:
        """Until all are ready, or one could not be started."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) == self._size or self._failure or self._closed)

    def close(self) -> None:
        """End the clones that nobody has taken. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._filler.join()
        while self._ready:
            self._ready.popleft().kill()

    def _fill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (len(self._ready) < self._size and self._failure is None)
                )
                if self._closed:
                    return
            try:
                clone = self._start()
            except SandboxError as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                continue
            with self._changed:
                self._ready.append(clone)
                self._changed.notify_all()

    def _start(self) -> Clone:
        clone = self._template.clone()
        try:
            clone.exec("true")
        except BaseException:
            clone.kill()
            raise
        return clone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
