"""A test's own clock is for the module under test alone. By one for the whole process the event loops of other
threads, such as that of another test's server, wait for as long as the two clocks are apart: for hours."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOR_ALL = re.compile(r"""setattr\(\s*(?:["'](?:[\w.]+\.)?time\.\w+["']|(?:\w+\.)*time,\s*["'])""")


def test_no_test_replaces_the_clock_of_the_whole_process() -> None:
    assert FOR_ALL.search('setattr("subten.bench.itl.time.monotonic", clock)')
    assert FOR_ALL.search('setattr(time, "sleep", clock)')
    assert not FOR_ALL.search('setattr("subten.bench.itl.time", SimpleNamespace(monotonic=clock))')
    sources = {path.name: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)}
    assert [name for name, text in sources.items() if FOR_ALL.search(text)] == []
