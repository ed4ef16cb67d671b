"""Conditions of rules, in the Common Expression Language (https://cel.dev)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from subten.errors import ExtraMissingError, PolicyError

_EXAMPLE = {"name": "git", "argv": ["git", "status"], "command": "git status", "cwd": "/"}


class CelCondition:
    """An expression over `name`, `argv`, `command` and `cwd` that gives true or false.

    Raises:
        PolicyError: it is not valid, or names other variables.
        ExtraMissingError: the package common-expression-language is not installed.
    """

    def __init__(self, expression: str, where: str) -> None:
        try:
            import cel
        except ImportError as error:
            raise ExtraMissingError(
                "a policy with `when` needs common-expression-language; install it with: pip install 'subten[agent]'"
            ) from error
        try:
            self._program: Any = cel.compile(expression)
            unknown = sorted(set(self._program.variables()) - set(_EXAMPLE) - _bound(expression))
        except Exception as error:
            raise PolicyError(f"{where}: `when: {expression}` is not a CEL expression: {error}") from error
        if unknown:
            raise PolicyError(
                f"{where}: `when: {expression}` uses {', '.join(unknown)}; it may use name, argv, command and cwd"
            )
        self._expression = expression
        self._where = where

    def holds(self, arguments: Sequence[str], cwd: str) -> bool:
        """Whether it is true for a command.

        Raises:
            PolicyError: its value is not true or false.
        """
        values = {
            "name": arguments[0].rpartition("/")[2],
            "argv": list(arguments),
            "command": " ".join(arguments),
            "cwd": cwd,
        }
        try:
            result = self._program.execute(values)
        except Exception as error:
            raise PolicyError(
                f"{self._where}: `when: {self._expression}` fails on {values['command']!r}: {error}"
            ) from error
        if not isinstance(result, bool):
            raise PolicyError(f"{self._where}: `when: {self._expression}` gives {result!r}; it must be true or false")
        return result


def _bound(expression: str) -> set[str]:
    """Names that macros such as `argv.exists(a, ...)` bind."""

    return set(re.findall(r"\.(?:all|exists|exists_one|filter|map)\(\s*(\w+)\s*,", expression))
