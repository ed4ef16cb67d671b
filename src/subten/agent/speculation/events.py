"""What happened in a run, as data: one line of JSON each, and nothing else is needed to show it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from subten.errors import ParameterError

VERSION = 1
"""Of the format; a reader refuses others."""

CAUSES = ("policy", "failure", "timeout", "dominated", "halving", "stopped")
"""Why branches end, in the order in which they are looked at. `stopped`: the run was given up."""


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        t: seconds since the run began.
    """

    kind: ClassVar[str] = ""
    t: float


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event; what the run was asked to do."""

    kind: ClassVar[str] = "run_started"
    version: int
    subten: str
    task: str
    check: str
    proposer: str
    branches: int
    rounds: int
    seed: int
    token_seconds: float
    """What a token counts as in a cost."""


@dataclass(frozen=True)
class RoundStarted(Event):
    """Branches of a round are about to begin."""

    kind: ClassVar[str] = "round_started"
    round: int


@dataclass(frozen=True)
class BranchStarted(Event):
    """A candidate is being proposed. `parent` is the branch whose conversation and sandbox it continues."""

    kind: ClassVar[str] = "branch_started"
    branch: int
    parent: int | None
    round: int


@dataclass(frozen=True)
class AnswerGrew(Event):
    """A piece of an answer came."""

    kind: ClassVar[str] = "answer_grew"
    branch: int
    text: str
    tokens: int


@dataclass(frozen=True)
class Judged(Event):
    """The policy spoke: while the plan streamed (`stream`, denials only), on the whole plan (`whole`), or on the
    files that it really changed (`files`, denials only)."""

    kind: ClassVar[str] = "judged"
    branch: int
    stage: str
    verdict: str
    rule: str
    reason: str
    span: tuple[int, int] | None


@dataclass(frozen=True)
class Asked(Event):
    """A person was asked whether a plan may run."""

    kind: ClassVar[str] = "asked"
    branch: int
    approved: bool


@dataclass(frozen=True)
class PlanStarted(Event):
    """A branch got a sandbox and its plan runs there."""

    kind: ClassVar[str] = "plan_started"
    branch: int
    clone: str
    tier: str


@dataclass(frozen=True)
class PlanRan(Event):
    """A plan came to its end, or to that of its time."""

    kind: ClassVar[str] = "plan_ran"
    branch: int
    exit_code: int
    timed_out: bool
    seconds: float
    output: str


@dataclass(frozen=True)
class Checked(Event):
    """The check was made: in the branch's sandbox, or (`confirms`) in a fresh one that got only its changes."""

    kind: ClassVar[str] = "checked"
    branch: int
    confirms: bool
    passed: bool
    value: float
    passed_tests: int | None
    tests: int | None
    seconds: float
    output: str


@dataclass(frozen=True)
class Pruned(Event):
    """A branch is given up; `by` is the branch that dominates it."""

    kind: ClassVar[str] = "pruned"
    branch: int
    cause: str
    reason: str
    by: int | None


@dataclass(frozen=True)
class Released(Event):
    """A branch holds nothing any more: neither a part of a KV cache or connection nor a sandbox."""

    kind: ClassVar[str] = "released"
    branch: int
    clone: str | None
    cpu_seconds: float | None
    """That its sandbox used."""


@dataclass(frozen=True)
class Won(Event):
    """The result: its changes, by path, as a diff, and what can't be taken over."""

    kind: ClassVar[str] = "won"
    branch: int
    changed: tuple[str, ...]
    refused: tuple[str, ...]
    diff: str


@dataclass(frozen=True)
class RunEnded(Event):
    """All is released. `reason` is one sentence."""

    kind: ClassVar[str] = "run_ended"
    winner: int | None
    reason: str


@dataclass(frozen=True)
class Applied(Event):
    """The winner's changes were made in a real folder."""

    kind: ClassVar[str] = "applied"
    folder: str


_KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        RunStarted,
        RoundStarted,
        BranchStarted,
        AnswerGrew,
        Judged,
        Asked,
        PlanStarted,
        PlanRan,
        Checked,
        Pruned,
        Released,
        Won,
        RunEnded,
        Applied,
    )
}


def to_json(event: Event) -> str:
    """One line, without its end; ASCII, so that lone surrogates survive."""
    return json.dumps({"event": event.kind, **asdict(event)}, allow_nan=False)


def from_json(line: str) -> Event:
    """The event of a line.

    Raises:
        ParameterError: it is none of this version; the message says what is wrong with it.
    """
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"it is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ParameterError("it is not a JSON object")
    event = _KINDS.get(str(values.pop("event", None)))
    if event is None:
        raise ParameterError("it has no `event` of a known kind")
    types = {field.name: str(field.type) for field in fields(event)}
    if set(values) != set(types):
        raise ParameterError(f"a {event.kind} has the keys {', '.join(types)}")
    for name, kind in types.items():
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
        if not _fits(values[name], kind):
            raise ParameterError(f"`{name}` of a {event.kind} must be of type {kind}")
    if event is RunStarted and values["version"] != VERSION:
        raise ParameterError(f"it is of version {values['version']}; this program reads version {VERSION}")
    return event(**values)


def _fits(value: Any, kind: str) -> bool:
    if kind.endswith(" | None"):
        return value is None or _fits(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").split(",")[0]
        return isinstance(value, tuple) and all(_fits(one, item) for one in value)
    if kind == "bool":
        return isinstance(value, bool)
    accepted = {"int": int, "float": (int, float), "str": str}[kind]
    return isinstance(value, accepted) and not isinstance(value, bool)  # type: ignore[arg-type]
