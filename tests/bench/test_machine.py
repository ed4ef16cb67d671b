from __future__ import annotations

import re

import pytest

from subten.bench.machine import first_line, source_commit


def test_the_commit_is_that_of_the_source() -> None:
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


def test_programs_that_are_not_there_or_fail_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert source_commit() is None


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("what went wrong\nand where")) == "what went wrong"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 1000))) == 200
