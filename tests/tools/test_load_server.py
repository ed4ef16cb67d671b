"""The load tool against a tiny model, for seconds instead of a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_model import save_tiny_model
from tools import load_server

ROOT = Path(__file__).parents[2]


SLOW = "the exit took 10 s or more"
"""A matter of the machine, which may have others to serve."""


def test_a_server_under_load_and_its_end(tmp_path: Path) -> None:
    model, output = save_tiny_model(tmp_path / "tiny"), tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "tools" / "load_server.py"), str(model), "--output", str(output)]
    command += ["--streams", "16", "--seconds", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    result = json.loads(output.read_text())
    problems = [problem for problem in result["problems"] if problem != SLOW]
    assert (done.returncode, problems) == (1 if SLOW in result["problems"] else 0, []), done.stderr
    assert result["finished"] == result["equal_to_single_run"] > 0
    assert result["cancelled"] > 0


GOOD = load_server.Result(
    "m", 2, 1.0, finished=3, equal_to_single_run=3, cancelled=1, malformed=1, exit_code=0, exit_seconds=5.0
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"server_errors": 1}, "server errors"),
        ({"equal_to_single_run": 2}, "differs from its single run"),
        ({"cancelled": 0}, "nothing cancelled"),
        ({"pages_in_use_at_end": 0.1}, "leaked"),
        ({"rss_mib_at_end": 100.0}, "memory has grown"),
        ({"exit_seconds": 10.0}, SLOW),
        ({"exit_code": -9}, "exit code"),
        ({"ended_in_silence": 1}, "in silence"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(changes: dict, problem: str) -> None:
    good, bad = replace(GOOD, problems=[]), replace(GOOD, problems=[], **changes)
    load_server.judge(good)
    load_server.judge(bad)
    assert good.problems == []
    assert len(bad.problems) == 1
    assert problem in bad.problems[0]
