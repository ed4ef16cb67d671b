"""Programs that die with this process, however it ends."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from subten.errors import SandboxError


def spawn(command: Sequence[str], passed: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a program with some open files of this process; only its standard error is kept, in a pipe.

    Linux signals the death of a parent (PR_SET_PDEATHSIG, which the program asks for) when the *thread* ends that
    started it, so all are started from one that lasts as long as the process.

    Raises:
        SandboxError: it can't be run.
    """
    try:
        return _thread(os.getpid()).submit(_start, list(command), tuple(passed)).result()
    except OSError as error:
        raise SandboxError(f"{command[0]} could not be started: {error}") from error


def _start(command: list[str], passed: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
    )


@functools.cache
def _thread(_process: int) -> ThreadPoolExecutor:
    """One for each process: a fork has no threads of its parent."""
    return ThreadPoolExecutor(1, thread_name_prefix="subten-spawn")
