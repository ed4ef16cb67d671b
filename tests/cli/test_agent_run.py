"""`subten agent run` and `subten agent replay`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subten.agent.sandbox import MOST_CLONES
from subten.agent.sandbox.process import unavailable
from subten.cli import agent_run
from support.processes import descendants, require_end

EXAMPLES = Path(__file__).parents[2] / "examples" / "agent_tasks"
CHECK = "python3 -m unittest -q"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "repo"
    shutil.copytree(EXAMPLES / "prices" / "repo", folder)
    return folder


def arguments(workspace: Path, *more: str, plans: str = "prices", check: str = CHECK) -> list[str]:
    given = ["--task", "Prices are old", "--check", check, "--workspace", str(workspace), "--tier", "process"]
    return ["agent", "run", *given, "--plans", str(EXAMPLES / plans / "plans"), "--timeout", "60", *more]


@pytest.fixture
def policy() -> list[str]:
    return ["--policy", str(EXAMPLES / "policy.yaml")]


def test_the_result_is_applied_and_the_log_shows_it(
    subten: Callable[..., Any], workspace: Path, policy: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl"
    result = subten(*arguments(workspace, *policy, "--yes", "--log", str(log)))
    assert result.exit_code == 0
    assert result.out.startswith("diff --git a/prices.py b/prices.py\n")
    assert "pruned (policy): a command deletes `tests`" in result.err
    assert result.err.endswith(f"applied to {workspace}\n")
    assert "_known.pop(article, None)" in (workspace / "prices.py").read_text()
    done = subprocess.run([sys.executable, "-m", "unittest", "-q"], cwd=workspace, capture_output=True)
    assert done.returncode == 0
    replayed = subten("agent", "replay", log)
    assert replayed.exit_code == 0
    assert "won" in replayed.out
    assert replayed.out.endswith(f"applied to {workspace}\n") or "applied to" in replayed.out
    assert subten("agent", "replay", log, "--speed", "2").out == replayed.out
    kinds = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert (kinds[0], kinds[-2:]) == ("run_started", ["run_ended", "applied"])


@pytest.mark.parametrize(("option", "said"), [("--dry-run", "nothing was applied"), (None, "--yes applies it")])
def test_nothing_is_applied_unless_somebody_says_so(
    subten: Callable[..., Any], workspace: Path, policy: list[str], option: str | None, said: str
) -> None:
    before = (workspace / "prices.py").read_text()
    result = subten(*arguments(workspace, *policy, *([option] if option else [])))
    assert result.exit_code == 0
    assert "diff --git" in result.out
    assert said in result.err
    assert (workspace / "prices.py").read_text() == before


def test_a_person_is_asked(
    subten: Callable[..., Any], workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    good = (EXAMPLES / "prices" / "plans" / "good.sh").read_text()
    (plans / "1.sh").write_text(f"{good}python3 -c 'print(1)'\n")
    given = arguments(workspace, "--branches", "1")
    given[given.index("--plans") + 1] = str(plans)
    refused = subten(*given)
    assert refused.exit_code == 2
    assert "a person would have to be asked" in refused.err
    without = subten(*given, "--ask")
    assert (without.exit_code, without.err.count("--ask needs a terminal")) == (2, 1)

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "y\n"

    monkeypatch.setattr(agent_run.sys, "stdin", Terminal())
    result = subten(*given, "--ask")
    assert result.exit_code == 0
    assert "The policy is unsure about this plan: python3 runs code" in result.err
    assert "Run it in a sandbox? [y/N] " in result.err
    assert "    python3 -c 'print(1)'\n" in result.err
    assert result.out.startswith("diff --git")
    assert "_known.pop(article, None)" in (workspace / "prices.py").read_text()
    assert not [thread for thread in threading.enumerate() if type(thread).__module__.startswith("rich.")]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--yes", "--dry-run"], "--yes and --dry-run are both given"),
        (["--policy", "/nothing.yaml"], "/nothing.yaml can't be read"),
        (["--model", "demo-moe"], "--plans is given beside --model or --endpoint"),
        (["--api-key-file", "/nothing"], "--api-key-file is given without the --endpoint"),
        (["--workspace", "/nothing"], "--workspace is '/nothing', which is no folder"),
        (["--plans", "/"], "/ holds no plans, which are files that end with .sh"),
        (["--check", "true"], "the check passes already"),
        (["--check", "no-such-program"], "the check can't be run in a sandbox"),
        (["--log", "/nothing/log"], "/nothing/log can't be written"),
        (["--timeout", "0"], "plan_seconds is 0.0"),
        (["--memory", "1"], "memory_mib is 1"),
        (["--branches", "0"], "branches is 0; it must be 1 to 64"),
        (["--branches", "1000000"], "branches is 1000000; it must be 1 to 64"),
        (["--tier", "container"], "Invalid value for '--tier'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    subten: Callable[..., Any], workspace: Path, more: list[str], words: str
) -> None:
    result = subten(*arguments(workspace, *more))
    assert result.exit_code == 2
    lines = [line for line in result.err.splitlines() if not line.startswith("[")]
    assert len(lines) == 1
    assert words in lines[0]


def test_without_anything_that_proposes(subten: Callable[..., Any], workspace: Path) -> None:
    given = ["agent", "run", "--task", "x", "--check", "false", "--workspace", str(workspace), "--tier", "process"]
    result = subten(*given)
    assert (result.exit_code, result.err.startswith("error: nothing says where plans come from")) == (2, True)
    result = subten(*given, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m")
    assert result.exit_code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith("error: the endpoint http://127.0.0.1:9/v1/chat/completions can't be reached")


def test_a_local_model_may_fail_and_says_how(subten: Callable[..., Any], workspace: Path, model: str) -> None:
    given = ["agent", "run", "--task", "x", "--check", "false", "--workspace", str(workspace), "--tier", "process"]
    result = subten(*given, "--model", model, "--max-tokens", "8", "--branches", "2")
    assert result.exit_code == 2
    assert result.err.splitlines()[-1].startswith("error: ")
    (workspace / "prices.py").unlink()
    shutil.rmtree(workspace / "tests")
    (workspace / "store.py").unlink()
    result = subten(*given, "--model", model, "--max-tokens", "8", "--branches", "2")
    assert result.err.splitlines()[-1].startswith("error: no plan passed the check: 2 failed (")


@pytest.mark.parametrize("command", ["run", "mcp"])
def test_help_says_how_many_sandboxes_there_may_be(subten: Callable[..., Any], command: str) -> None:
    assert f"1 to {MOST_CLONES}" in " ".join(subten("agent", command, "--help").out.replace("│", " ").split())


def test_no_plan_passes(subten: Callable[..., Any], workspace: Path, policy: list[str]) -> None:
    result = subten(*arguments(workspace, *policy, "--branches", "4", "--timeout", "10", plans="pages"))
    assert result.exit_code == 2
    assert result.err.splitlines()[-1].startswith("error: no plan passed the check: 1 stopped by the policy")
    assert not result.out


def test_an_interrupt_leaves_nothing(workspace: Path, tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    (plans / "1.sh").write_text("sleep 1234\n")
    given = arguments(workspace, "--branches", "1", "--timeout", "60", "--log", str(tmp_path / "log"))
    given[given.index("--plans") + 1] = str(plans)
    # As at a terminal: what a shell starts in the background ignores interrupts, and so would its children.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from subten.cli import main; sys.exit(main())"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code, *given], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while "plan_started" not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert time.monotonic() < deadline
            assert command.poll() is None, command.communicate()
            time.sleep(0.05)
        family = descendants(command.pid)
        assert family
        command.send_signal(signal.SIGINT)
        _, printed = command.communicate(timeout=60)
    finally:
        command.kill()
    assert command.returncode == 130
    assert "Traceback" not in printed
    assert '"cause": "stopped"' in (tmp_path / "log").read_text()
    require_end(family)


def test_files_that_are_no_log(subten: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("nothing\n")
    result = subten("agent", "replay", path)
    assert result.exit_code == 2
    assert result.err.startswith(f"error: {path}:1 is no event of a run: ")
    assert subten("agent", "replay", tmp_path / "missing").exit_code == 2
