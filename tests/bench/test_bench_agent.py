"""`python -m subten.bench agent`: a row for every tier, with its figures or the reason why there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from subten.agent.sandbox.process import unavailable
from subten.bench import agent
from subten.bench.__main__ import MISSING_FIGURES, main

FIGURES = {
    *(
        "kind",
        "tier",
        "clone_ms",
        "first_output_ms",
        "taken_ms",
        "exec_ms",
        "exec_ms_p99",
        "parallel_ms",
        "kill_ms",
        "memory_mib",
    ),
}


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(agent, "why_no_machine", lambda: "no machine here")
    path = tmp_path / "agent.json"
    assert main(["agent", "--clones", "1", "--commands", "3", "--json", str(path)]) == MISSING_FIGURES
    result = json.loads(path.read_text())
    process, microvm = result["rows"]
    assert microvm == {"kind": "microvm", "unavailable": "no machine here"}
    if unavailable() is None:
        assert set(process) == FIGURES
        assert 0 < process["clone_ms"] <= process["first_output_ms"]
        assert 0 < process["exec_ms"] <= process["exec_ms_p99"]
    else:
        assert process == {"kind": "process", "unavailable": unavailable()}
    assert result["policy"]["decisions_per_second"] > 0
    assert result["machine"]["cores"] >= 1
    assert "microvm: no machine here" in capsys.readouterr().out
