"""The state of a run as a function of its events: what a live view, a replay and the run itself look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subten.agent.speculation.events import (
    AnswerGrew,
    Applied,
    Asked,
    BranchStarted,
    Checked,
    Event,
    Judged,
    PlanRan,
    PlanStarted,
    Pruned,
    Released,
    RoundStarted,
    RunEnded,
    RunStarted,
    Won,
)


@dataclass(frozen=True)
class Node:
    """A branch.

    Attributes:
        branch: its number.
        parent: the branch that it continues; None for one that begins at the task.
        round: in which it began.
        began: seconds after the run.
        phase: what it is at: `proposing`, `waiting` (for a person or a sandbox), `running`, `checking`, `scored`,
            `pruned` or `won`.
        text: its answer so far.
        tokens: of the answer.
        judged: the last thing the policy said.
        approved: what a person said, where one was asked.
        clone: the sandbox that it had or has.
        tier: what kind of sandbox that is.
        ran: how its plan ended.
        checked: the last check.
        pruned: why it was given up.
        released: what it held is free.
        seconds: of its sandbox: plan and checks.
        cpu_seconds: that its sandbox used, once it is gone.
        ended: seconds after the run, when it was pruned or won.
    """

    branch: int
    parent: int | None
    round: int
    began: float
    phase: str = "proposing"
    text: str = ""
    tokens: int = 0
    judged: Judged | None = None
    approved: bool | None = None
    clone: str | None = None
    tier: str | None = None
    ran: PlanRan | None = None
    checked: Checked | None = None
    pruned: Pruned | None = None
    released: bool = False
    seconds: float = 0.0
    cpu_seconds: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Tree:
    """A run.

    Attributes:
        started: what it was asked to do; None before its first event.
        round: that began last.
        nodes: branches by number, in the order in which they began.
        won: the result.
        ended: None while it goes on.
        applied: the folder in which the result was put in place.
        t: seconds after the beginning, of the last event.
    """

    started: RunStarted | None = None
    round: int = 0
    nodes: Mapping[int, Node] = field(default_factory=lambda: MappingProxyType({}))
    won: Won | None = None
    ended: RunEnded | None = None
    applied: str | None = None
    t: float = 0.0

    def cost(self, branch: int) -> float:
        """Of a branch with all that it continues, in seconds: those of sandboxes, and tokens at their price."""
        node = self.nodes[branch]
        assert self.started is not None
        own = node.seconds + node.tokens * self.started.token_seconds
        return own if node.parent is None else own + self.cost(node.parent)


def fold(events: Iterable[Event]) -> Tree:
    """The state after all of these."""
    tree = Tree()
    for event in events:
        tree = after(tree, event)
    return tree


def after(tree: Tree, event: Event) -> Tree:
    """The state after one more event."""
    tree = replace(tree, t=event.t)
    match event:
        case RunStarted():
            return replace(tree, started=event)
        case RoundStarted():
            return replace(tree, round=event.round)
        case BranchStarted():
            return _with(tree, Node(event.branch, event.parent, event.round, event.t))
        case AnswerGrew():
            node = tree.nodes[event.branch]
            return _change(tree, node, text=node.text + event.text, tokens=node.tokens + event.tokens)
        case Judged():
            return _change(tree, tree.nodes[event.branch], judged=event, phase="waiting")
        case Asked():
            return _change(tree, tree.nodes[event.branch], approved=event.approved)
        case PlanStarted():
            return _change(tree, tree.nodes[event.branch], clone=event.clone, tier=event.tier, phase="running")
        case PlanRan():
            node = tree.nodes[event.branch]
            return _change(tree, node, ran=event, phase="checking", seconds=node.seconds + event.seconds)
        case Checked():
            node = tree.nodes[event.branch]
            phase = "checking" if event.passed else "scored"
            return _change(tree, node, checked=event, phase=phase, seconds=node.seconds + event.seconds)
        case Pruned():
            return _change(tree, tree.nodes[event.branch], pruned=event, phase="pruned", ended=event.t)
        case Released():
            return _change(tree, tree.nodes[event.branch], released=True, cpu_seconds=event.cpu_seconds)
        case Won():
            return replace(_change(tree, tree.nodes[event.branch], phase="won", ended=event.t), won=event)
        case RunEnded():
            return replace(tree, ended=event)
        case Applied():
            return replace(tree, applied=event.folder)
    raise AssertionError(f"{event.kind} has no effect")


def _with(tree: Tree, node: Node) -> Tree:
    return replace(tree, nodes=MappingProxyType({**tree.nodes, node.branch: node}))


def _change(tree: Tree, node: Node, **fields: object) -> Tree:
    return _with(tree, replace(node, **fields))  # type: ignore[arg-type]
