"""Scoring a branch by what the user calls success."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from subten.agent.sandbox import Clone
from subten.errors import ParameterError

ENVIRONMENT: Mapping[str, str] = {"PYTHONDONTWRITEBYTECODE": "1"}
"""For plans and checks: what Python would leave beside the sources is no part of a fix."""

_OUTPUT_CHARACTERS = 2000
_PYTEST = re.compile(r"(\d+) (passed|failed|errors?)\b")
_UNITTEST = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_UNITTEST_BAD = re.compile(r"^(?:FAIL|ERROR): (\S+ \([^)]*\))", re.MULTILINE)
_ALMOST = 0.999
"""The most that a check which failed is worth, whatever it counted."""


@dataclass(frozen=True)
class Score:
    """What a check says.

    Attributes:
        passed: whether this is success.
        value: 1 for success, less for less; of tests the share that passed.
        passed_tests: None where none were counted.
        tests: None where none were counted.
        output: the end of what it printed.
        seconds: it took, in the sandbox.
        timed_out: it was ended because its time was up.
        exit_code: of a command; None where the check is none.

    Raises:
        ParameterError: a value outside 0 to 1.
    """

    passed: bool
    value: float
    passed_tests: int | None = None
    tests: int | None = None
    output: str = ""
    seconds: float = 0.0
    timed_out: bool = False
    exit_code: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise ParameterError(f"a check gave the value {self.value}; it must be between 0 and 1")


Check = Callable[[Clone], Score]
"""Any function of a clone in which the plan has run. It must come to an end when the clone is ended."""


class CommandCheck:
    """A command that leaves with 0 on success. Tests that pytest and unittest report are counted.

    Args:
        command: for `/bin/sh -c`, in the workspace.
        timeout: seconds.
    """

    def __init__(self, command: str, timeout: float = 60.0) -> None:
        self._command = command
        self._timeout = timeout

    def __str__(self) -> str:
        return self._command

    def __call__(self, clone: Clone) -> Score:
        """Run it.

        Raises:
            SandboxError: the clone was ended or does not answer.
        """
        result = clone.exec(self._command, timeout=self._timeout, env=ENVIRONMENT)
        printed = (result.stdout + result.stderr).decode(errors="replace")
        counted = count_tests(printed)
        passed_tests, tests = counted or (None, None)
        partly = min(_ALMOST, passed_tests / tests) if passed_tests and tests else 0.0
        return Score(
            passed=result.ok,
            value=1.0 if result.ok else partly,
            passed_tests=passed_tests,
            tests=tests,
            output=ending(printed),
            seconds=result.seconds,
            timed_out=result.timed_out,
            exit_code=result.exit_code,
        )


def count_tests(printed: str) -> tuple[int, int] | None:
    """How many tests passed and how many there were, by the last summary of pytest or unittest; None without one."""
    for line in reversed(printed.splitlines()):
        counts = {word.rstrip("s"): int(number) for number, word in _PYTEST.findall(line)}
        if counts and " in " in line:
            passed = counts.get("passed", 0)
            return passed, passed + counts.get("failed", 0) + counts.get("error", 0)
    ran = list(_UNITTEST.finditer(printed))
    if not ran:
        return None
    tests = int(ran[-1][1])
    # A test counts once, however many of its subtests failed.
    return max(0, tests - len(set(_UNITTEST_BAD.findall(printed)))), tests


def ending(text: str) -> str:
    """The end of a text that may be long."""
    return text if len(text) <= _OUTPUT_CHARACTERS else f"...{text[-_OUTPUT_CHARACTERS:]}"
