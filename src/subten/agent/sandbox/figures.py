"""How fast the clones of a template are here, measured; for the doctor and the benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from subten.agent.sandbox.interface import Clone, Template
from subten.agent.sandbox.pool import Pool
from subten.errors import SandboxError

_COMMAND = "echo ready"
_PARALLEL = 8


@dataclass(frozen=True)
class Figures:
    """Times in milliseconds, medians where not said otherwise.

    Attributes:
        tier: what kind of sandbox.
        clone_ms: from the call to a clone that was given its clock and identity.
        first_output_ms: from the same call to the first output of the first command.
        taken_ms: from taking a clone out of a pool that has one ready to the first output of its first command.
        exec_ms: one command in a clone that has run some, from the call to its result.
        exec_ms_p99: the 99th percentile of that.
        parallel_ms: eight clones started at once and each asked for output, until the last has answered.
        kill_ms: until a clone is gone.
        memory_mib: memory of a clone that has run commands, pages that it shares with others counted in parts.
    """

    tier: str
    clone_ms: float
    first_output_ms: float
    taken_ms: float
    exec_ms: float
    exec_ms_p99: float
    parallel_ms: float
    kill_ms: float
    memory_mib: float | None


def measure(template: Template, clones: int = 5, commands: int = 50) -> Figures:
    """Start some clones one after the other, run commands in the last, then start eight at once.

    Args:
        template: of the clones.
        clones: how many.
        commands: how many are timed, at least 2.
    """
    starts, firsts, kills = [], [], []
    for _ in range(clones):
        began = time.perf_counter()
        with template.clone() as clone:
            starts.append(time.perf_counter() - began)
            _answer(clone)
            firsts.append(time.perf_counter() - began)
            kills.append(_seconds(clone.kill))
    with template.clone() as clone:
        for _ in range(10):
            _answer(clone)
        commands_took = [_seconds(lambda: _answer(clone)) for _ in range(commands)]
        memory = _memory_mib(clone.process_id)
    taken = [_take(template) for _ in range(clones)]
    return Figures(
        tier=template.tier,
        clone_ms=_ms(statistics.median(starts)),
        first_output_ms=_ms(statistics.median(firsts)),
        taken_ms=_ms(statistics.median(taken)),
        exec_ms=_ms(statistics.median(commands_took)),
        exec_ms_p99=_ms(statistics.quantiles(commands_took, n=100, method="inclusive")[98]),
        parallel_ms=_ms(_seconds(lambda: _at_once(template))),
        kill_ms=_ms(statistics.median(kills)),
        memory_mib=memory,
    )


def _at_once(template: Template) -> None:
    def start(_: int) -> None:
        with template.clone() as clone:
            _answer(clone)

    with ThreadPoolExecutor(_PARALLEL) as threads:
        list(threads.map(start, range(_PARALLEL)))


def _take(template: Template) -> float:
    with Pool(template, 1) as pool:
        pool.wait()
        began = time.perf_counter()
        with pool.take() as clone:
            _answer(clone)
            return time.perf_counter() - began


def _answer(clone: Clone) -> None:
    if clone.exec(_COMMAND).stdout != b"ready\n":
        raise SandboxError(f"'{_COMMAND}' did not print what it should in a clone of the tier {clone.tier}")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _memory_mib(process: int) -> float | None:
    """Proportional set size of a process and all below it; None where this user may not see it."""
    try:
        kib = sum(_pss_kib(one) for one in _family(process))
    except (OSError, ValueError, StopIteration):
        return None
    return round(kib / 1024, 1)


def _pss_kib(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1])


def _family(process: int) -> list[int]:
    found = [process]
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += _family(int(child))
    return found
