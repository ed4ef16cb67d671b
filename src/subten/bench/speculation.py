"""Speculation against doing one thing after the other, on the example tasks.

A scripted proposer gives plans of known kinds, so that what is compared is the search and not a model. Its tokens
come at a stated rate in every stream, as in a decode step that is bound by memory: they are simulated, and cost no
processor time. Everything else is real: policy, sandboxes, tests. All strategies get the same plans in the same
order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from subten.agent.policy import Policy, load_policy
from subten.agent.sandbox import MicroVMTemplate, Pool, ProcessTemplate, Template
from subten.agent.speculation import (
    CommandCheck,
    Node,
    Options,
    Outcome,
    Proposer,
    ScriptedProposer,
    Search,
    conversation,
)
from subten.agent.speculation.local import EngineProposer
from subten.agent.speculation.plan import fenced
from subten.agent.speculation.scripted import tokens
from subten.bench.agent_tasks import KINDS, POLICY, AgentTask, load_tasks
from subten.bench.host import describe_host
from subten.bench.terminal import new_table
from subten.engine import LLM, AsyncEngine, SamplingParams
from subten.errors import SubtenError
from subten.outputs import OutputFile

PLANS = 8
"""At most so many for a task, whatever the strategy."""

BRANCHES = 4
MIX = {"good": 0.25, "wrong": 0.35, "hanging": 0.15, "denied": 0.25}
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Processor seconds of sandboxes, at which strategies are compared."""

_DEMO = "demo-moe"
_DEMO_TOKENS = 96
_DEMO_CHARACTERS = 1000


@dataclass(frozen=True)
class Strategy:
    """How plans are tried.

    Attributes:
        name: of the strategy.
        branches: plans at a time.
        first_wins: whether the first that passes ends the search.
        stream_policy: whether a plan is judged while it comes.
    """

    name: str
    branches: int
    first_wins: bool
    stream_policy: bool


SEQUENTIAL = Strategy("sequential", 1, True, False)
BEST_OF_N = Strategy(f"best of {BRANCHES}", BRANCHES, False, False)
SPECULATIVE = Strategy("speculative", BRANCHES, True, True)
ONE_BRANCH = Strategy("speculative, 1 branch", 1, True, True)

SCENARIOS: tuple[tuple[str, Mapping[str, float], tuple[Strategy, ...]], ...] = (
    ("mix", MIX, (SEQUENTIAL, BEST_OF_N, SPECULATIVE)),
    ("mix", MIX, (ONE_BRANCH,)),
    ("always right", {"good": 1.0}, (SEQUENTIAL, BEST_OF_N, SPECULATIVE)),
)


@dataclass(frozen=True)
class _Place:
    """What all runs of a measurement have in common."""

    tier: str
    policy: Policy
    seconds: float
    seed: int


def run_speculation(
    folder: Path,
    path: Path | None,
    *,
    tier: str,
    ms_per_token: float,
    seconds: float,
    seed: int,
    most: int | None,
    demo: bool,
    note: str | None,
    say: Callable[[str], None],
    commit: str | None,
) -> None:
    """Measure, print and write.

    Args:
        folder: of the tasks.
        path: of the result, written after each part.
        tier: of sandboxes, "process" or "microvm".
        ms_per_token: at which tokens of the scripted proposer come.
        seconds: for a plan, and for each check.
        seed: of the draws.
        most: tasks, or None for all.
        demo: whether the demo model is tried too.
        note: for the result: what else is to be known about the machine.
        say: gets a line before each part.
        commit: of the source, where git can't tell.

    Raises:
        SubtenError: tasks can't be read, or sandboxes not be started.
    """
    tasks = load_tasks(folder)[:most]
    place = _Place(tier, load_policy(folder / POLICY), seconds, seed)
    file = None if path is None else OutputFile(path)
    result: dict[str, Any] = {
        "benchmark": "speculation",
        "machine": {**describe_host(commit), "note": note},
        "settings": {
            "tier": tier,
            "tasks": [task.name for task in tasks],
            "simulated_ms_per_token": ms_per_token,
            "mix": MIX,
            "plans_at_most": PLANS,
            "seconds_for_plan_and_check": seconds,
            "seed": seed,
        },
        "rows": [],
        "demo_moe": None,
        "runs": [],
    }
    for scenario, mix, strategies in SCENARIOS:
        for strategy in strategies:
            say(f"{scenario}: {strategy.name}")
            runs = [_run(task, place, strategy, mix, ms_per_token / 1e3) for task in tasks]
            result["rows"].append({"scenario": scenario, "strategy": strategy.name, **summarise(runs)})
            result["runs"] += [{"scenario": scenario, "strategy": strategy.name, **run} for run in runs]
            _write(file, result)
    if demo:
        say(_DEMO)
        result["demo_moe"] = asyncio.run(_demo(tasks, place, say))
    result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    _write(file, result)
    Console(width=160).print(_table(result))


def drawn_plans(task: AgentTask, mix: Mapping[str, float], seed: int) -> list[str]:
    """The kinds of a task's plans, in the order in which every strategy gets them."""
    chance = random.Random(f"{seed} {task.name}")
    kinds = [kind for kind in KINDS if kind in mix]
    return chance.choices(kinds, [mix[kind] for kind in kinds], k=PLANS)


def measured(outcome: Outcome, kinds: Sequence[str]) -> dict[str, Any]:
    """The figures of one run, from its events."""
    nodes = list(outcome.tree.nodes.values())
    winner = None if outcome.winner is None else outcome.tree.nodes[outcome.winner]
    losers = [node for node in nodes if node is not winner]
    return {
        "passed": winner is not None,
        "plans": [kinds[node.branch] for node in nodes],
        "winner": outcome.winner,
        "first_pass_s": _first_pass(nodes),
        "result_s": None if winner is None or winner.ended is None else round(winner.ended, 3),
        "end_s": round(outcome.tree.t, 3),
        "cpu_s": _sum(node.cpu_seconds for node in nodes),
        "wasted_cpu_s": _sum(node.cpu_seconds for node in losers),
        "tokens": sum(node.tokens for node in nodes),
        "wasted_tokens": sum(node.tokens for node in losers),
        "pruned": dict(Counter(node.pruned.cause for node in nodes if node.pruned)),
        "denied": [
            {"tokens": node.tokens, "stage": node.judged.stage}
            for node in nodes
            if node.judged is not None and node.judged.verdict == "deny"
        ],
    }


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and sums over the tasks. A task that was not passed has no time, and is missed at every budget."""
    passed = [run for run in runs if run["passed"]]
    denied = [denial["tokens"] for run in runs for denial in run["denied"]]
    return {
        "tasks": len(runs),
        "passed": len(passed),
        "median_first_pass_s": _median(run["first_pass_s"] for run in passed),
        "median_result_s": _median(run["result_s"] for run in passed),
        "sum_of_ends_s": _sum(run["end_s"] for run in runs),
        "cpu_s": _sum(run["cpu_s"] for run in runs),
        "wasted_cpu_s": _sum(run["wasted_cpu_s"] for run in runs),
        "tokens": sum(run["tokens"] for run in runs),
        "wasted_tokens": sum(run["wasted_tokens"] for run in runs),
        "denied": len(denied),
        "median_tokens_until_denial": _median(denied),
        "median_tokens_of_denied_plans": _median(length for run in runs for length in run["denied_plans_tokens"]),
        "passed_within_cpu_s": {str(budget): sum(run["cpu_s"] <= budget for run in passed) for budget in BUDGETS},
    }


def _run(
    task: AgentTask, place: _Place, strategy: Strategy, mix: Mapping[str, float], token_seconds: float
) -> dict[str, Any]:
    kinds = drawn_plans(task, mix, place.seed)
    answers = [f"I will repair this.\n\n{fenced(task.plans[kind])}" for kind in kinds]
    proposer = ScriptedProposer(answers, seconds_per_token=token_seconds)
    options = Options(
        branches=strategy.branches,
        rounds=PLANS // strategy.branches,
        plan_seconds=place.seconds,
        first_wins=strategy.first_wins,
        stream_policy=strategy.stream_policy,
        repair=False,
    )
    with _template(task, place.tier) as template, Pool(template, strategy.branches) as pool:
        pool.take().kill()  # It is warm before the clock runs.
        outcome = asyncio.run(_search(proposer, task, place, options, pool))
    lengths = [len(tokens(answer)) for answer in answers]
    row = measured(outcome, kinds)
    denied = [kind == "denied" for kind in row["plans"]]
    row["denied_plans_tokens"] = [length for length, is_denied in zip(lengths, denied, strict=False) if is_denied]
    return {"task": task.name, **row}


async def _search(
    proposer: Proposer, task: AgentTask, place: _Place, options: Options, pool: Pool, characters: int = 24_000
) -> Outcome:
    check = CommandCheck(task.check, place.seconds)
    search = Search(proposer, pool, check, policy=place.policy, task=task.text, options=options)
    return await search.run(conversation(task.text, task.check, task.workspace, characters))


async def _demo(tasks: Sequence[AgentTask], place: _Place, say: Callable[[str], None]) -> dict[str, Any]:
    """The demo model as the proposer. It was made to test the engine; its failures are what there is to report."""
    llm = LLM(_DEMO, max_batch=BRANCHES)
    params = SamplingParams(temperature=0.8, max_tokens=_DEMO_TOKENS)
    options = Options(branches=BRANCHES, rounds=1, plan_seconds=place.seconds, seed=place.seed)
    ends: Counter[str] = Counter()
    rows = []
    async with AsyncEngine(llm) as engine:
        proposer = EngineProposer(engine, params, _DEMO)
        for task in tasks:
            say(f"{_DEMO}: {task.name}")
            with _template(task, place.tier) as template, Pool(template, 1) as pool:
                try:
                    outcome = await _search(proposer, task, place, options, pool, _DEMO_CHARACTERS)
                except SubtenError as error:
                    rows.append({"task": task.name, "passed": False, "error": str(error)})
                    continue
            nodes = outcome.tree.nodes.values()
            ends.update(_end(node) for node in nodes)
            rows.append(
                {
                    "task": task.name,
                    "passed": outcome.winner is not None,
                    "end_s": round(outcome.tree.t, 3),
                    "tokens": sum(node.tokens for node in nodes),
                    "ends": [_end(node) for node in nodes],
                    "answers": [node.text[:200] for node in nodes],
                }
            )
    llm.check_integrity()
    return {
        "model": _DEMO,
        "kv": llm.kv.name,
        "branches": BRANCHES,
        "max_tokens": _DEMO_TOKENS,
        "passed": sum(row["passed"] for row in rows),
        "ends": dict(ends.most_common()),
        "runs": rows,
    }


def _end(node: Node) -> str:
    """How a branch ended, in words that can be counted."""
    if node.pruned is None:
        return node.phase
    return f"{node.pruned.cause}: {node.pruned.reason.split(':')[0]}"


def _template(task: AgentTask, tier: str) -> Template:
    return MicroVMTemplate(task.workspace) if tier == "microvm" else ProcessTemplate(task.workspace)


def _first_pass(nodes: Sequence[Node]) -> float | None:
    times = [node.checked.t for node in nodes if node.checked and node.checked.confirms and node.checked.passed]
    return round(min(times), 3) if times else None


def _sum(values: Any) -> float:
    return round(sum(value or 0.0 for value in values), 3)


def _median(values: Any) -> float | None:
    listed = list(values)
    return round(statistics.median(listed), 3) if listed else None


def _write(file: OutputFile | None, result: Mapping[str, Any]) -> None:
    if file is not None:
        file.write(json.dumps(result, indent=1).encode() + b"\n")


def _table(result: Mapping[str, Any]) -> Table:
    rate = result["settings"]["simulated_ms_per_token"]
    table = new_table(
        f"{result['settings']['tier']} tier, simulated tokens every {rate:g} ms",
        None,
        ("plans", "strategy"),
        (
            "passed",
            "result, s",
            "CPU, s",
            "wasted",
            "tokens",
            "wasted",
            "until denial",
            *map("<= {} s".format, BUDGETS),
        ),
    )
    for row in result["rows"]:
        table.add_row(
            row["scenario"],
            row["strategy"],
            f"{row['passed']}/{row['tasks']}",
            *(
                "-" if row[key] is None else f"{row[key]:g}"
                for key in (
                    "median_result_s",
                    "cpu_s",
                    "wasted_cpu_s",
                    "tokens",
                    "wasted_tokens",
                    "median_tokens_until_denial",
                )
            ),
            *map(str, row["passed_within_cpu_s"].values()),
        )
    demo = result["demo_moe"]
    if demo is not None:
        table.caption = f"{demo['model']} as proposer passed {demo['passed']} of {len(demo['runs'])}: " + "; ".join(
            f"{count} {end}" for end, count in demo["ends"].items()
        )
    return table
