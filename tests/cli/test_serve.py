"""`subten serve`: what is wrong with its options is one line. Serving itself is tested in tests/server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "the setting port is 70000"),
        (["--api-key-file", "nowhere"], "nowhere can't be read"),
        (["--max-queue", "-1"], "the setting max_queue is -1"),
        (["--kv", "nonsense"], "nonsense"),
    ],
)
def test_bad_options_are_one_line(subten: Callable[..., Any], model: str, options: list[str], words: str) -> None:
    result = subten("serve", model, "--max-context", "100", *options)
    assert result.exit_code == 2
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert words in line
