"""Whole runs in real sandboxes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from subten.agent.policy import Policy
from subten.agent.sandbox import Changes, Clone, Pool, ProcessTemplate, interface
from subten.agent.speculation import CommandCheck, Options, Outcome, ScriptedProposer, Search, conversation
from subten.agent.speculation.plan import fenced
from subten.agent.speculation.workspace import replant

GOOD = "sed -i 's/a - b/a + b/' calc.py\n"
WRONG = "sed -i 's/a - b/b - a/' calc.py\n"
CHECK = CommandCheck("python3 -m unittest -q", timeout=30)
POLICY = Policy(protect_paths=["/workspace/tests"])


class Counting:
    """A pool that remembers what it gave out."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.taken: list[Clone] = []

    def take(self) -> Clone:
        self.taken.append(self.pool.take())
        return self.taken[-1]


def search(pool: Pool, plans: list[str], check: Any = CHECK, **options: Any) -> Outcome:
    source = Counting(pool)
    proposer = ScriptedProposer([fenced(plan) for plan in plans])
    options = {"branches": len(plans), "plan_seconds": 20, **options}
    run = Search(proposer, source, check, policy=POLICY, options=Options(**options))
    outcome = asyncio.run(run.run([]))
    assert not any(clone.alive for clone in source.taken)
    return outcome


def test_the_plan_that_passes_is_applied(pool: Pool, repository: Path, tmp_path: Path) -> None:
    outcome = search(pool, [WRONG, "rm -r tests\n", GOOD, "sleep 100\n"])
    assert outcome.winner == 2
    assert outcome.changes is not None
    node = outcome.tree.nodes[2]
    assert (node.checked.passed_tests, node.checked.tests) == (2, 2)
    assert node.tier == "process: not a VM"
    assert node.cpu_seconds > 0
    folder = tmp_path / "copy"
    shutil.copytree(repository, folder)
    outcome.changes.apply(folder)
    assert (folder / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert sorted(path.name for path in folder.iterdir()) == ["calc.py", "old", "tests"]


def test_in_microvms(machines: Pool) -> None:
    outcome = search(machines, ["rm -r tests\n", GOOD])
    assert outcome.winner == 1
    assert outcome.tree.nodes[1].tier.startswith("microvm")


def test_a_plan_stops_at_its_first_failure(pool: Pool) -> None:
    outcome = search(pool, ["cat missing\n" + GOOD])
    assert "exit code 1: cat: missing: No such file or directory" in outcome.reason


def test_a_hanging_plan_runs_out_of_time(pool: Pool) -> None:
    outcome = search(pool, ["sleep 100\n"], plan_seconds=0.5)
    assert outcome.tree.nodes[0].pruned.cause == "timeout"


def test_a_check_that_hangs_runs_out_of_time(pool: Pool) -> None:
    hanging = GOOD + "echo 'while True: pass' >> calc.py\n"
    outcome = search(pool, [hanging], CommandCheck("python3 -m unittest -q", timeout=1))
    assert outcome.tree.nodes[0].pruned.cause == "timeout"


def test_what_a_plan_leaves_elsewhere_does_not_help_it(pool: Pool) -> None:
    """The module that makes the check pass is no part of the workspace, so the check is made again without it."""
    hidden = "mkdir -p /home/agent/lib\nsed 's/a - b/a + b/' calc.py > /home/agent/lib/calc.py\n"
    check = CommandCheck("PYTHONSAFEPATH=1 PYTHONPATH=/home/agent/lib:. python3 -m unittest -q", timeout=30)
    outcome = search(pool, [hidden], check)
    assert outcome.winner is None
    assert "does not pass on the changed files alone" in outcome.reason


def test_a_second_round_goes_on_in_a_branch_of_the_first(pool: Pool) -> None:
    first = "echo 'def sub(a, b): return a - b' >> calc.py\n"
    second = "grep -q 'def sub' calc.py\n" + GOOD
    outcome = search(pool, [first, second], branches=1, rounds=2)
    assert outcome.winner == 1
    assert outcome.tree.nodes[1].parent == 0
    assert outcome.changes is not None
    assert "+def sub" in outcome.changes.diff()


def test_a_guest_that_never_answers(process_template: ProcessTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def take(self) -> Clone:
            clone = process_template.clone()
            self.clone = clone
            for task in Path(f"/proc/{clone.process_id}/task").iterdir():
                for child in (task / "children").read_text().split():
                    os.kill(int(child), signal.SIGSTOP)
            monkeypatch.setattr(interface, "GRACE_SECONDS", 0.5)
            return clone

    source = Silent()
    run = Search(ScriptedProposer([fenced(GOOD)]), source, CHECK, options=Options(branches=1, plan_seconds=0.5))
    outcome = asyncio.run(run.run([]))
    assert outcome.tree.nodes[0].pruned.cause == "failure"
    assert "was ended" in outcome.reason
    assert not source.clone.alive


def test_changes_are_repeated_exactly(pool: Pool) -> None:
    script = (
        "rm -r old && mkdir -p new/deep private && printf 'a\\0b' > 'new/deep/odd name' && chmod 755 calc.py && "
        "ln -s ../calc.py new/link && rm tests/__init__.py && mkdir tests/__init__.py && "
        "echo x > private/x && chmod 600 private/x && chmod 700 private"
    )
    with pool.take() as one, pool.take() as other:
        assert one.exec(script).ok
        changes = one.changes()
        replant(changes, other)
        assert other.changes() == changes
    assert isinstance(changes, Changes)
    assert len(changes.changed) >= 9


def test_a_callable_scores(pool: Pool) -> None:
    from subten.agent.speculation import Score

    def is_short(clone: Clone) -> Score:
        text = clone.get("calc.py")
        return Score(passed=b"+" in text, value=1.0 if b"+" in text else 0.0)

    assert search(pool, [WRONG, GOOD], is_short).winner == 1


def test_what_a_model_is_told(repository: Path) -> None:
    system, user = conversation("add adds", "make test", repository)
    assert "```bash" in system["content"]
    assert user["content"].startswith("Task: add adds\n\nCheck: make test\n\nFile calc.py:\ndef add(a, b):")
    _, short = conversation("add adds", "make test", repository, characters=40)
    assert "Other files: " in short["content"]
    assert "tests/test_calc.py" in short["content"]
    assert "class AddTest" not in short["content"]
