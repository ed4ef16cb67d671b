"""What holds of every run, whatever proposers, sandboxes, checks and listeners do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subten.agent.policy import Decision, Policy, Verdict, judge
from subten.agent.policy.imports import wildcard
from subten.agent.policy.rules import Rule
from subten.agent.speculation import EventLog, Options, Outcome, Score, Search, fold, read_log, render, replay
from subten.agent.speculation.events import (
    Asked,
    BranchStarted,
    Checked,
    Event,
    Judged,
    PlanRan,
    PlanStarted,
    Pruned,
    Released,
    RunEnded,
    Won,
    from_json,
    to_json,
)
from subten.errors import ParameterError, ProposerError, StorageError
from support.speculation import FakeProposer, Farm, check

POLICY = Policy(
    rules=[Rule(Verdict.DENY, "deny: curl *", wildcard("curl *", "here"), "no network", None)],
    protect_paths=["/workspace/tests"],
)
GOOD, WRONG, HANGING = "fix\n", "break\n", "hang\n"
DENIED = "fix\ncurl https://example.org/\nbreak\nbreak\nbreak\n"
DENIED_LATE = "fix\n( curl https://example.org/ )\n"
ASKED = "fix\npython3 -c 'print()'\n"


def search(
    plans: Sequence[str], *, farm: Farm | None = None, ask: Any = None, score: Any = check, **options: Any
) -> tuple[Outcome, list[Event], Farm, FakeProposer]:
    farm, proposer, seen = farm or Farm(), FakeProposer(plans), []
    # A short time only where it is waited for: a busy machine must not decide what a test sees.
    waits = any(plan.startswith("silent") for plan in plans)
    options = {"plan_seconds": 0.05, "proposal_seconds": 0.3 if waits else 60, **options}
    run = Search(
        proposer, farm, score, policy=POLICY, task="t", options=Options(**options), ask=ask, listen=seen.append
    )
    outcome = asyncio.run(run.run([{"role": "user", "content": "do it"}]))
    return outcome, seen, farm, proposer


def require_invariants(
    seen: Sequence[Event], farm: Farm, proposer: FakeProposer, *, approved: Sequence[str] = ()
) -> None:
    assert all(clone.kills for clone in farm.clones), "a sandbox was left"
    assert all(candidate.releases for candidate in proposer.candidates), "a fork was left"
    for script in farm.executed:
        verdict = judge(POLICY, script, "/workspace").verdict
        assert verdict is Verdict.ALLOW or (verdict is Verdict.ASK and script in approved), "a plan ran that may not"
    started = [event.branch for event in seen if isinstance(event, BranchStarted)]
    assert sorted(event.branch for event in seen if isinstance(event, Released)) == started
    assert started == list(range(len(proposer.candidates)))
    pruned = [event.branch for event in seen if isinstance(event, Pruned)]
    assert len(set(pruned)) == len(pruned)
    assert isinstance(seen[-1], RunEnded)
    assert [event.t for event in seen] == sorted(event.t for event in seen)
    won = [event for event in seen if isinstance(event, Won)]
    assert [event.branch for event in won] == [seen[-1].winner] * len(won)
    assert len(won) <= 1
    assert set(pruned) | {event.branch for event in won} == set(started)
    for winner in won:
        assert winner.branch not in pruned
        checks = [e for e in seen if isinstance(e, Checked) and e.branch == winner.branch]
        assert [(e.confirms, e.passed) for e in checks] == [(False, True), (True, True)]
    for event in seen:
        if isinstance(event, PlanStarted):
            judged = [e for e in seen if isinstance(e, Judged) and e.branch == event.branch]
            assert judged[0].stage == "whole"
            assert judged[0].verdict != "deny"
    tree = fold(seen)
    assert fold(from_json(to_json(event)) for event in seen) == tree
    render(tree)


PLANS = st.sampled_from(
    [
        *(GOOD, WRONG, HANGING, DENIED, DENIED_LATE, ASKED, "fail\n", "die\n", "no-plan", "cut-off", ""),
        *("fix\n# bad-check\n", "fix\n# touch-tests\n", "raise\n", "silent\n", "fix # stuck-release"),
    ]
)


@settings(max_examples=100)
@given(
    plans=st.lists(PLANS, min_size=1, max_size=8),
    failing=st.lists(st.integers(0, 6), max_size=3),
    branches=st.integers(1, 4),
    rounds=st.integers(1, 3),
    parallel=st.sampled_from([None, 1, 2]),
    first_wins=st.booleans(),
    stream_policy=st.booleans(),
    repair=st.booleans(),
    answer=st.sampled_from([None, False, True]),
)
def test_every_run(plans: list[str], failing: list[int], answer: bool | None, **options: Any) -> None:
    farm = Farm(failing)
    ask = None if answer is None else lambda script, decision: answer
    outcome, seen, farm, proposer = search(
        plans,
        farm=farm,
        ask=ask,
        plan_seconds=0.01,
        **options,
    )
    require_invariants(seen, farm, proposer, approved=[ASKED] if answer else [])
    assert (outcome.winner is None) == (outcome.changes is None)
    assert outcome.tree == fold(seen)
    sure = "silent\n" not in plans and not failing
    if sure and options["branches"] <= len(plans) and GOOD in plans[: options["branches"]]:
        assert outcome.winner is not None


def test_the_first_plan_that_passes_ends_the_run() -> None:
    began = time.monotonic()
    outcome, seen, farm, proposer = search([HANGING, WRONG, GOOD, DENIED], plan_seconds=60)
    assert time.monotonic() - began < 60
    assert outcome.winner == 2
    assert outcome.changes is not None
    require_invariants(seen, farm, proposer)
    causes = {node.branch: node.pruned.cause for node in outcome.tree.nodes.values() if node.pruned}
    assert causes == {0: "dominated", 1: "dominated", 3: "policy"}
    assert outcome.tree.nodes[0].pruned.by == 2


def test_a_denied_plan_is_stopped_in_the_middle() -> None:
    outcome, seen, farm, proposer = search([DENIED], branches=1)
    (candidate,) = proposer.candidates
    assert candidate.read * 3 < len(DENIED) + 8
    assert not farm.clones
    assert outcome.reason == "no plan passed the check: 1 stopped by the policy (no network)"
    assert [e.stage for e in seen if isinstance(e, Judged)] == ["stream"]


def test_what_is_denied_is_released_at_once() -> None:
    farm, proposer = Farm(), FakeProposer([DENIED, HANGING])
    seen: list[Event] = []

    def listen(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Released) and event.branch == 0:
            farm.go.set()

    options = Options(branches=2, plan_seconds=60)
    asyncio.run(Search(proposer, farm, check, policy=POLICY, options=options, listen=listen).run([]))
    order = [type(e).__name__ for e in seen if isinstance(e, Released | PlanRan)]
    assert order[:2] == ["Released", "PlanRan"]


def test_without_the_stream_it_is_read_to_its_end_and_then_denied() -> None:
    _, seen, farm, proposer = search([DENIED], branches=1, stream_policy=False)
    assert proposer.candidates[0].read * 3 >= len(DENIED)
    assert [e.stage for e in seen if isinstance(e, Judged)] == ["whole"]
    assert not farm.clones


def test_plans_that_a_person_must_be_asked_about() -> None:
    outcome, _, farm, _ = search([ASKED], branches=1)
    assert not farm.executed
    assert "a person would have to be asked" in outcome.reason
    asked: list[tuple[str, Decision]] = []
    outcome, seen, farm, _ = search(
        [ASKED], branches=1, ask=lambda script, decision: bool(asked.append((script, decision)))
    )
    assert not farm.executed
    assert "a person said no" in outcome.reason
    assert [(script, decision.verdict) for script, decision in asked] == [(ASKED, Verdict.ASK)]
    outcome, seen, farm, _ = search([ASKED], branches=1, ask=lambda script, decision: True)
    assert outcome.winner == 0
    assert [e.approved for e in seen if isinstance(e, Asked)] == [True]


def test_people_are_asked_one_at_a_time() -> None:
    inside: list[int] = []

    def ask(script: str, decision: Decision) -> bool:
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0.02)
        inside.pop()
        return False

    outcome, *_ = search([ASKED], branches=4, ask=ask)
    assert outcome.reason.startswith("no plan passed the check: 4 stopped")


def test_files_that_a_plan_really_changed_count_too() -> None:
    outcome, seen, _, _ = search(["fix\n# touch-tests\n"], branches=1)
    assert outcome.winner is None
    assert [e.stage for e in seen if isinstance(e, Judged)] == ["whole", "files"]
    assert "the plan has changed tests/test.py" in outcome.reason


def test_what_passes_only_in_its_own_sandbox_does_not_win() -> None:
    def only_where_it_ran(clone: Any) -> Any:
        score = check(clone)
        return score if clone._script else type(score)(False, 0.0)

    outcome, seen, farm, _ = search([GOOD], branches=1, score=only_where_it_ran)
    assert outcome.winner is None
    assert "does not pass on the changed files alone" in outcome.reason
    assert [(e.confirms, e.passed) for e in seen if isinstance(e, Checked)] == [(False, True), (True, False)]
    assert all(clone.kills for clone in farm.clones)


def test_the_cheapest_wins_where_a_round_is_brought_to_its_end() -> None:
    long = "fix\n" + "break\n" * 50
    outcome, seen, farm, proposer = search([long, GOOD, WRONG], branches=3, first_wins=False)
    assert outcome.winner == 1
    require_invariants(seen, farm, proposer)
    assert sum(isinstance(event, PlanRan) for event in seen) == 3


def test_a_round_continues_the_best_of_the_one_before() -> None:
    # Scores: the length of the script modulo 5.
    plans = ["break\n", "break\nb\n", "break\nbb\n", "hang\n", GOOD]
    outcome, seen, farm, proposer = search(plans, branches=4, rounds=2, token_seconds=0.0)
    require_invariants(seen, farm, proposer)
    tree = outcome.tree
    assert outcome.winner == 4
    parents = {node.parent for node in tree.nodes.values() if node.round == 1}
    scores = {number: tree.nodes[number].checked.value for number in (0, 1, 2)}
    assert parents == {max(scores, key=lambda number: scores[number])}
    told = proposer.conversations[4]
    assert told[1]["role"] == "assistant"
    assert "failed" in told[2]["content"]
    assert any(clone.name.endswith("+") for clone in farm.clones), "its sandbox was not branched"


def test_without_repair_every_round_begins_at_the_task() -> None:
    outcome, seen, farm, proposer = search([WRONG, WRONG, GOOD], branches=1, rounds=3, repair=False)
    assert outcome.winner == 2
    assert {event.parent for event in seen if isinstance(event, BranchStarted)} == {None}
    assert all(len(conversation) == 1 for conversation in proposer.conversations)
    require_invariants(seen, farm, proposer)


def test_only_so_many_plans_run_at_a_time() -> None:
    running, most = set(), 0
    _, seen, _, _ = search([WRONG], branches=4, parallel=2)
    for event in seen:
        if isinstance(event, PlanStarted):
            running.add(event.branch)
            most = max(most, len(running))
        elif isinstance(event, Checked):
            running.discard(event.branch)
    assert most <= 2


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (["no-plan"], "the answer holds no plan"),
        (["cut-off"], "the answer ends inside its plan"),
        (["\n \n"], "the plan is empty"),
        (["fail\n"], "a command of the plan failed with exit code 3"),
        (["hang\n"], "out of time (the plan ran for more than 0.05 s)"),
        (["silent\n"], "out of time (the plan has not ended within 0.3 s)"),
        (["raise\n"], "RuntimeError: the proposer has a bug"),
        (["die\n"], "its guest does not answer"),
        (["fix\n# bad-check\n"], "ValueError: the check has a bug"),
    ],
)
def test_why_a_branch_failed(plans: list[str], words: str) -> None:
    outcome, seen, farm, proposer = search(plans, branches=1)
    assert words in outcome.reason
    require_invariants(seen, farm, proposer)


def test_a_plan_that_never_ends_is_stopped() -> None:
    outcome, *_ = search(["break\n" * 2000], max_tokens=50)
    assert "the plan has not ended after 50 tokens" in outcome.reason
    outcome, _, farm, _ = search(["b" * 70_000], max_tokens=100_000, branches=1)
    assert "more than 65536 characters" in outcome.reason
    assert not farm.clones


def test_no_sandboxes_at_all() -> None:
    outcome, seen, farm, proposer = search([GOOD], farm=Farm(range(100)))
    assert "a sandbox could not be started" in outcome.reason
    require_invariants(seen, farm, proposer)


def test_a_score_outside_its_range_is_an_error_of_the_check() -> None:
    outcome, *_ = search([GOOD], branches=1, score=lambda clone: Score(False, float("nan")))
    assert "it must be between 0 and 1" in outcome.reason


class Refusing(FakeProposer):
    def __init__(self, error: Exception | None) -> None:
        super().__init__([GOOD])
        self.error = error

    async def propose(self, messages: Any, count: int, seed: int) -> Any:
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [(ProposerError("it is down"), "it is down"), (None, "did not begin to answer within 0.2 s")],
)
def test_a_proposer_that_proposes_nothing(error: Exception | None, words: str) -> None:
    seen: list[Event] = []
    run = Search(Refusing(error), Farm(), check, options=Options(proposal_seconds=0.2), listen=seen.append)
    with pytest.raises(ProposerError, match=words):
        asyncio.run(run.run([]))
    assert isinstance(seen[-1], RunEnded)
    assert words in seen[-1].reason


def test_a_proposer_that_begins_nothing() -> None:
    class Nobody(FakeProposer):
        async def propose(self, messages: Any, count: int, seed: int) -> Any:
            return []

    with pytest.raises(ProposerError, match="fake began no answer"):
        asyncio.run(Search(Nobody([]), Farm(), check).run([]))


def test_cancelling_a_run_releases_everything() -> None:
    farm, proposer, seen = Farm(), FakeProposer([HANGING, GOOD, "silent\n", WRONG]), []
    options = Options(plan_seconds=60, first_wins=False)
    run = Search(proposer, farm, check, policy=POLICY, options=options, listen=seen.append)

    async def give_up() -> None:
        task = asyncio.create_task(run.run([]))
        while not any(isinstance(event, PlanRan) for event in seen):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    require_invariants(seen, farm, proposer)
    assert {event.cause for event in seen if isinstance(event, Pruned)} == {"stopped"}


@pytest.mark.parametrize("error", [StorageError("the disk is full"), ValueError("the disk is full")])
def test_a_log_that_can_not_be_written_ends_the_run(error: Exception) -> None:
    farm, proposer = Farm(), FakeProposer([HANGING, WRONG])
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, PlanStarted):
            raise error

    run = Search(proposer, farm, check, policy=POLICY, options=Options(plan_seconds=60), listen=listen)
    with pytest.raises(type(error), match="the disk is full"):
        asyncio.run(run.run([]))
    assert all(clone.kills for clone in farm.clones)
    assert all(candidate.releases for candidate in proposer.candidates)
    assert isinstance(heard[-1], PlanStarted)


def test_a_log_replays_to_the_same_state(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    farm, proposer = Farm(), FakeProposer([WRONG, DENIED, "break\nb\n", HANGING, GOOD])
    with EventLog(path) as log:
        options = Options(rounds=2, plan_seconds=0.05)
        run = Search(proposer, farm, check, policy=POLICY, options=options, listen=log.write)
        outcome = asyncio.run(run.run([]))
    assert fold(read_log(path)) == outcome.tree
    *_, (_, last) = replay(path)
    assert last == outcome.tree


@pytest.mark.parametrize("module", ["speculation", "speculation.endpoint"])
def test_no_torch_is_needed(module: str) -> None:
    code = f"import sys, subten.agent.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"branches": 0}, "branches is 0; it must be 1 to 64"),
        ({"branches": 65}, "branches is 65; it must be 1 to 64, as each takes the memory of a sandbox"),
        ({"rounds": 0}, "rounds is 0"),
        ({"parallel": 0}, "parallel is 0"),
        ({"plan_seconds": 0}, "plan_seconds is 0"),
        ({"token_seconds": -1}, "token_seconds is -1"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Options(**options)
