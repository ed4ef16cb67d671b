"""Scores of checks, and changes that are repeated or forbidden."""

from __future__ import annotations

import pytest

from subten.agent.sandbox import Change, Changes, Entry
from subten.agent.speculation.check import count_tests, ending
from subten.agent.speculation.workspace import protected_change


@pytest.mark.parametrize(
    ("printed", "counts"),
    [
        ("===== 3 passed in 0.01s =====\n", (3, 3)),
        ("2 failed, 5 passed, 1 skipped, 1 error in 1.20s\n", (5, 8)),
        ("1 passed in 0.1s\n3 failed in 0.2s\n", (0, 3)),
        ("1 passed\n", None),
        ("Ran 5 tests in 0.001s\n\nOK\n", (5, 5)),
        (
            "FAIL: test_a (t.A.test_a)\nERROR: test_b (t.A.test_b)\nRan 5 tests in 0.001s\n\nFAILED (failures=1)\n",
            (3, 5),
        ),
        ("FAIL: test_a (t.A.test_a) [x]\nFAIL: test_a (t.A.test_a) [y]\nRan 1 test in 0.001s\n", (0, 1)),
        ("", None),
        ("all is well", None),
    ],
)
def test_tests_are_counted(printed: str, counts: tuple[int, int] | None) -> None:
    assert count_tests(printed) == counts


def test_only_the_end_of_what_is_printed_is_kept() -> None:
    assert ending("short") == "short"
    assert len(ending("x" * 5000)) < 2100


OLD, NEW, EMPTY, FOLDER = (
    Entry("file", 0o644, b"old"),
    Entry("file", 0o644, b"new"),
    Entry("file", 0o644),
    Entry("folder", 0o755),
)


@pytest.mark.parametrize(
    ("change", "forbidden"),
    [
        (Change("tests/a.py", OLD, NEW), True),
        (Change("tests/a.py", OLD, None), True),
        (Change("tests/conftest.py", None, NEW), True),
        (Change("tests/a.py", None, Entry("link", 0o777, b"../x")), True),
        (Change("tests", FOLDER, None), True),
        (Change("tests", FOLDER, NEW), True),
        (Change("tests/empty", None, EMPTY), False),
        (Change("tests/folder", None, FOLDER), False),
        (Change("tests/a.py", OLD, Entry("file", 0o755, b"old")), False),
        (Change("testsuite.py", OLD, NEW), False),
        (Change("src/a.py", OLD, None), False),
        (Change("deep/er", FOLDER, Entry("folder", 0o700)), False),
    ],
)
def test_protected_changes(change: Change, forbidden: bool) -> None:
    found = protected_change(Changes((change,)), ["/workspace/tests", "/workspace/deep/er/still"])
    assert found == ((change.path, "/workspace/tests") if forbidden else None)
