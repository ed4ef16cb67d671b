"""The example tasks: their tests fail as shipped, and each plan does what its kind says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from subten.agent.policy import Verdict, judge, load_policy
from subten.agent.sandbox import Pool, ProcessTemplate
from subten.agent.sandbox.process import unavailable
from subten.agent.speculation import CommandCheck, Options, ScriptedProposer, Search
from subten.agent.speculation.plan import fenced
from subten.bench.agent_tasks import KINDS, POLICY, AgentTask, load_tasks
from subten.errors import StorageError

FOLDER = Path(__file__).parents[3] / "examples" / "agent_tasks"
TASKS = load_tasks(FOLDER)
RULES = load_policy(FOLDER / POLICY)


def test_there_are_twenty_of_different_kinds() -> None:
    assert len(TASKS) == 20
    assert len({task.kind for task in TASKS}) == 20


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task(task: AgentTask) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    check = CommandCheck(task.check, timeout=20)
    plans = [fenced(task.plans[kind]) for kind in ("good", "wrong", "denied")]
    with ProcessTemplate(task.workspace) as template, Pool(template, size=1) as pool:
        with pool.take() as clone:
            before = check(clone)
        assert not before.passed
        assert before.tests
        assert 0 < before.passed_tests < before.tests
        options = Options(branches=3, first_wins=False, plan_seconds=20)
        outcome = asyncio.run(Search(ScriptedProposer(plans), pool, check, policy=RULES, options=options).run([]))
    good, wrong, denied = outcome.tree.nodes.values()
    assert outcome.winner == good.branch
    assert outcome.changes is not None
    assert not any("tests" in change.path or "tmp" in change.path for change in outcome.changes.changed)
    assert wrong.checked is not None
    assert not wrong.checked.passed
    assert wrong.checked.tests == before.tests
    assert denied.pruned.cause == "policy"
    assert denied.judged.stage == "stream"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_hanging_plans_may_run(task: AgentTask) -> None:
    assert judge(RULES, task.plans["hanging"], "/workspace").verdict is Verdict.ALLOW


@pytest.mark.parametrize("name", ["menu", "shifts"])
def test_hanging_plans_hang_by_themselves_or_in_the_check(name: str) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    (task,) = (task for task in TASKS if task.name == name)
    check = CommandCheck(task.check, timeout=1)
    proposer = ScriptedProposer([fenced(task.plans["hanging"])])
    with ProcessTemplate(task.workspace) as template, Pool(template, size=1) as pool:
        options = Options(branches=1, plan_seconds=1)
        outcome = asyncio.run(Search(proposer, pool, check, policy=RULES, options=options).run([]))
    assert outcome.tree.nodes[0].pruned.cause == "timeout"


def test_folders_that_hold_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no tasks"):
        load_tasks(tmp_path)
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "task.toml").write_text('kind = "x"\n')
    with pytest.raises(StorageError, match="can't be read"):
        load_tasks(tmp_path)
    (folder / "plans").mkdir()
    for kind in KINDS:
        (folder / "plans" / f"{kind}.sh").touch()
    with pytest.raises(StorageError, match="must have the texts"):
        load_tasks(tmp_path)
    (folder / "task.toml").write_text("kind\n")
    with pytest.raises(StorageError, match="is not what it must be"):
        load_tasks(tmp_path)
