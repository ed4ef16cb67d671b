"""`subten agent run` and `subten agent replay`: several plans for one task, side by side in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subten.cli import options
from subten.cli.files import read_text
from subten.cli.terminal import note, progress, write_text
from subten.cli.threads import suit_threads
from subten.errors import ParameterError, StorageError

if TYPE_CHECKING:
    from subten.agent.policy import Decision
    from subten.agent.sandbox import Limits, Template
    from subten.agent.speculation import Outcome, Proposer
    from subten.agent.speculation.events import Event

NOTHING_PASSES = 2
_FRAMES_PER_SECOND = 8


class Tier(StrEnum):
    """What plans run in."""

    MICROVM = "microvm"
    PROCESS = "process"


@dataclass(frozen=True)
class _Source:
    """Where plans come from: exactly one of these."""

    model: str | None
    endpoint: str | None
    key_file: Path | None
    plans: Path | None
    device: str
    max_tokens: int
    temperature: float
    branches: int

    def __post_init__(self) -> None:
        if self.key_file is not None and self.endpoint is None:
            raise ParameterError("--api-key-file is given without the --endpoint that the key is for")
        if self.plans is not None and (self.model is not None or self.endpoint is not None):
            raise ParameterError("--plans is given beside --model or --endpoint; plans come from one of them")
        if self.plans is None and self.model is None:
            raise ParameterError(
                "nothing says where plans come from; give --model, or --endpoint with the --model there, or --plans"
            )


def agent_run(
    task: Annotated[str, typer.Option(help="What is wanted, in words.")],
    check: Annotated[str, typer.Option(help="Command that leaves with 0 when it is there, such as 'pytest -q'.")],
    workspace: Annotated[Path, typer.Option(help="Folder to work on; a copy of it goes into sandboxes.")] = Path(),
    branches: Annotated[int, typer.Option(help="Plans at a time, each in a sandbox, 1 to 64.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Times that plans are asked for.")] = 1,
    model: Annotated[str | None, typer.Option(help="Local model, or its name at the --endpoint.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="URL of an OpenAI API, such as http://host:8000/v1.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the endpoint's key.")] = None,
    plans: Annotated[Path | None, typer.Option(help="Folder of .sh files to try instead of asking a model.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file; the workspace is /workspace there.")] = None,
    tier: Annotated[Tier, typer.Option(help="What plans run in.")] = Tier.MICROVM,
    timeout: Annotated[float, typer.Option(help="Seconds for a plan, and for each check.")] = 60.0,
    memory: Annotated[int, typer.Option(help="MiB of memory of a sandbox.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 2048,
    temperature: Annotated[float, typer.Option(help="Of the answers.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Makes a local model's answers repeatable.")] = 0,
    device: options.Device = "auto",
    log: Annotated[Path | None, typer.Option(help="Write all events to this file, a JSON object a line.")] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask you about plans that the policy is unsure of.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Apply the result without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the result and apply nothing.")] = False,
) -> None:
    """Have several plans for a task proposed, judged, run in sandboxes and checked; keep the first that passes.

    The result is printed as a diff and applied when you say so. Leaves with 2 where no plan passes.
    """
    from subten.agent.policy import Policy, load_policy
    from subten.agent.sandbox import Limits, Pool
    from subten.agent.speculation import CommandCheck, Options, Search, conversation, one_line
    from subten.agent.speculation.events import Applied

    if yes and dry_run:
        raise ParameterError("--yes and --dry-run are both given; the first applies the result, the second does not")
    if ask and not sys.stdin.isatty():
        raise ParameterError(
            "--ask needs a terminal; without one, plans that a person must be asked about do not run"
        )
    if not workspace.is_dir():
        raise ParameterError(f"--workspace is '{workspace}', which is no folder")
    source = _Source(model, endpoint, api_key_file, plans, device, max_tokens, temperature, branches)
    rules = Policy() if policy is None else load_policy(policy)
    search_options = Options(branches=branches, rounds=rounds, plan_seconds=timeout, max_tokens=max_tokens, seed=seed)
    checked = CommandCheck(check, timeout)

    async def search(pool: Pool, listen: Callable[[Event], None], ask: Callable[[str, Decision], bool]) -> Outcome:
        async with _proposer(source) as proposer:
            run = Search(
                proposer,
                pool,
                checked,
                policy=rules,
                task=task,
                options=search_options,
                ask=ask if asking else None,
                listen=listen,
            )
            return await run.run(conversation(task, check, workspace))

    asking = ask
    began = time.monotonic()
    with _log(log) as write:
        with _template(tier, workspace, Limits(memory_mib=memory)) as template, Pool(template, branches) as pool:
            with pool.take() as clone:
                before = checked(clone)
            if before.passed:
                raise ParameterError("the check passes already in a copy of this workspace; there is nothing to do")
            if before.exit_code in (126, 127):
                raise ParameterError(f"the check can't be run in a sandbox: {before.output.strip()}")
            with _screen(write) as (listen, confirm):
                outcome = asyncio.run(search(pool, listen, confirm))
        if outcome.changes is None:
            note(f"error: {one_line(outcome.reason)}")
            raise typer.Exit(NOTHING_PASSES)
        write_text(outcome.changes.diff())
        for refusal in outcome.changes.refused:
            note(one_line(f"left out: {refusal.path}: {refusal.reason}"))
        if dry_run or not (yes or _confirmed(f"Apply this to {workspace}?")):
            note("nothing was applied" if dry_run or sys.stdin.isatty() else "nothing was applied; --yes applies it")
            return
        outcome.changes.apply(workspace)
        write(Applied(t=round(time.monotonic() - began, 6), folder=str(workspace)))
        note(f"applied to {workspace}")


def agent_replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `subten agent run --log` has written.")],
    speed: Annotated[
        float, typer.Option(min=0, help="Show it as it went, so many times as fast; 0 shows the end.")
    ] = 0,
) -> None:
    """Show a run again from its log."""
    from rich.console import Console
    from rich.live import Live

    from subten.agent.speculation import Tree, fold, read_log, render

    events = read_log(file)
    console = Console()
    if speed == 0 or not console.is_terminal:
        console.print(render(fold(events)))
        return
    from subten.agent.speculation import after

    tree = Tree()
    with Live(render(tree), console=console, refresh_per_second=_FRAMES_PER_SECOND) as live:
        for event in events:
            time.sleep(max(0.0, event.t - tree.t) / speed)
            tree = after(tree, event)
            live.update(render(tree))


@contextlib.asynccontextmanager
async def _proposer(source: _Source) -> AsyncIterator[Proposer]:
    from subten.agent.speculation import ScriptedProposer
    from subten.agent.speculation.plan import fenced

    if source.plans is not None:
        yield ScriptedProposer([fenced(script) for script in _scripts(source.plans)])
    elif source.endpoint is not None:
        from subten.agent.speculation.endpoint import EndpointProposer

        assert source.model is not None
        key = None if source.key_file is None else read_text(source.key_file).strip()
        async with EndpointProposer(
            source.endpoint,
            source.model,
            key=key,
            max_tokens=source.max_tokens,
            temperature=source.temperature,
        ) as remote:
            yield remote
    else:
        from subten.agent.speculation.local import EngineProposer
        from subten.engine import LLM, AsyncEngine, SamplingParams

        assert source.model is not None
        params = SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens)
        with progress("loading") as loaded:
            llm = LLM(source.model, max_batch=source.branches, device=source.device, progress=loaded)
        suit_threads(llm.model)
        async with AsyncEngine(llm) as engine:
            yield EngineProposer(engine, params, source.model)


def _scripts(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.sh"))
    if not paths:
        raise StorageError(f"{folder} holds no plans, which are files that end with .sh")
    return [read_text(path) for path in paths]


def _template(tier: Tier, workspace: Path, limits: Limits) -> Template:
    from subten.agent.sandbox import MicroVMTemplate, ProcessTemplate

    if tier is Tier.PROCESS:
        return ProcessTemplate(workspace, limits=limits)
    return MicroVMTemplate(workspace, limits=limits)


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Callable[[Event], None]]:
    from subten.agent.speculation import EventLog

    if path is None:
        yield lambda event: None  # noqa: ARG005
        return
    with EventLog(path) as log:
        yield log.write


@contextlib.contextmanager
def _screen(
    write: Callable[[Event], None],
) -> Iterator[tuple[Callable[[Event], None], Callable[[str, Decision], bool]]]:
    """Shows the run on stderr: as a tree that moves on a terminal, otherwise line by line."""
    from rich.console import Console
    from rich.live import Live

    from subten.agent.speculation import Tree, after, describe, one_line, render

    console = Console(stderr=True)
    tree = Tree()
    live = Live(console=console, get_renderable=lambda: render(tree), refresh_per_second=_FRAMES_PER_SECOND)

    def listen(event: Event) -> None:
        nonlocal tree
        write(event)
        tree = after(tree, event)
        if not console.is_terminal and (line := describe(event)) is not None:
            note(line)

    def confirm(script: str, decision: Decision) -> bool:
        shown = live.is_started
        live.stop()
        note(f"The policy is unsure about this plan: {one_line(decision.reason)}\n")
        for line in script.splitlines():
            note(f"    {one_line(line)}")
        answer = _confirmed("Run it in a sandbox?")
        if shown:
            live.start(refresh=True)
        return answer

    if console.is_terminal:
        with live:
            yield listen, confirm
    else:
        yield listen, confirm


def _confirmed(question: str) -> bool:
    """What a person says; no where there is none."""
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
