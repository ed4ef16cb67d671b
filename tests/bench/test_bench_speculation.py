"""`python -m subten.bench speculation`: the same plans for all, and figures that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from subten.agent.sandbox.process import unavailable
from subten.bench import speculation
from subten.bench.__main__ import main
from subten.bench.agent_tasks import KINDS, load_tasks
from subten.bench.speculation import MIX, PLANS, drawn_plans, summarise

TASKS = Path(__file__).parents[2] / "examples" / "agent_tasks"


def test_plans_are_drawn_by_seed_and_task() -> None:
    one, other, *_ = load_tasks(TASKS)
    assert drawn_plans(one, MIX, 0) == drawn_plans(one, MIX, 0)
    assert drawn_plans(one, MIX, 0) != drawn_plans(one, MIX, 1)
    assert drawn_plans(one, MIX, 0) != drawn_plans(other, MIX, 0)
    assert drawn_plans(one, {"good": 1.0}, 0) == ["good"] * PLANS
    assert set(MIX) == set(KINDS)


def test_what_was_not_passed_has_no_time_and_is_missed_at_every_budget() -> None:
    passed = {
        "passed": True,
        "first_pass_s": 1.0,
        "result_s": 2.0,
        "end_s": 2.5,
        "cpu_s": 0.75,
        "wasted_cpu_s": 0.25,
        "tokens": 30,
        "wasted_tokens": 10,
        "denied": [{"tokens": 7, "stage": "stream"}],
        "denied_plans_tokens": [21],
    }
    failed = {**passed, "passed": False, "first_pass_s": None, "result_s": None, "denied": []}
    row = summarise([passed, failed])
    assert (row["tasks"], row["passed"], row["median_result_s"], row["cpu_s"]) == (2, 1, 2.0, 1.5)
    assert (row["wasted_tokens"], row["denied"], row["median_tokens_until_denial"]) == (20, 1, 7)
    assert row["passed_within_cpu_s"] == {"0.5": 0, "1.0": 1, "2.0": 1, "4.0": 1, "8.0": 1}
    assert summarise([failed])["median_result_s"] is None


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    # Plans that hang are tested elsewhere; here they would take all the time.
    mix = {"good": 0.4, "wrong": 0.3, "denied": 0.3}
    strategies = (speculation.SEQUENTIAL, speculation.SPECULATIVE)
    monkeypatch.setattr(speculation, "SCENARIOS", (("mix", mix, strategies),))
    path = tmp_path / "result.json"
    given = ["--tasks", str(TASKS), "--most", "2", "--ms-per-token", "0", "--no-demo", "--note", "a test"]
    assert main(["speculation", *given, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["machine"]["note"] == "a test"
    assert result["demo_moe"] is None
    assert [row["strategy"] for row in result["rows"]] == ["sequential", "speculative"]
    runs: dict[str, list[Any]] = {row["strategy"]: [] for row in result["rows"]}
    for run in result["runs"]:
        runs[run["strategy"]].append(run)
    for one, other in zip(*runs.values(), strict=True):
        shared = min(len(one["plans"]), len(other["plans"]))
        assert one["plans"][:shared] == other["plans"][:shared]
        for run in (one, other):
            assert run["passed"] == ("good" in run["plans"])
            if run["passed"]:
                assert run["plans"][run["winner"]] == "good"
                assert 0 < run["first_pass_s"] <= run["result_s"] <= run["end_s"]
            assert 0 <= run["wasted_cpu_s"] <= run["cpu_s"]
    assert "sequential" in capsys.readouterr().out


def test_a_folder_without_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speculation", "--tasks", str(tmp_path)]) == 2
    assert "holds no tasks" in capsys.readouterr().err
