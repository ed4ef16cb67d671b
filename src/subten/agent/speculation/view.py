"""A run on a terminal: a tree, as a pure function of the state. A replay shows the same."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree as RichTree

from subten.agent.speculation.events import Checked, Event, Judged, Pruned, RoundStarted, RunEnded, Won
from subten.agent.speculation.tree import Node, Tree

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_STYLES = {"proposing": "cyan", "waiting": "yellow", "running": "blue", "checking": "blue", "won": "bold green"}
_LONGEST = 90


def render(tree: Tree) -> RenderableType:
    """The whole run: the task, every branch below the one that it continues, and how it stands."""
    started = tree.started
    if started is None:
        return Text("nothing has begun")
    head = Text()
    head.append(_line(started.task) or "a run", style="bold")
    head.append(f"\n{_line(started.proposer)}; check: {_line(started.check)}", style="dim")
    top = RichTree(head, guide_style="dim")
    places: dict[int | None, RichTree] = {None: top}
    for node in tree.nodes.values():
        places[node.branch] = places[node.parent].add(_node(tree, node))
    return Group(top, _foot(tree))


def describe(event: Event) -> str | None:
    """An event as one line for a log; None for those that are too many or say nothing to a person."""
    match event:
        case RoundStarted():
            return f"[{event.t:6.2f} s] round {event.round + 1}"
        case Judged() if event.verdict != "allow":
            said = f"{event.verdict} ({event.stage}): {one_line(event.reason)}"
            return f"[{event.t:6.2f} s] #{event.branch} {said}"
        case Checked():
            where = "confirmed" if event.confirms else "check"
            verdict = "passed" if event.passed else "failed"
            return f"[{event.t:6.2f} s] #{event.branch} {where}: {verdict}{_tests(event)}"
        case Pruned():
            return f"[{event.t:6.2f} s] #{event.branch} pruned ({event.cause}): {one_line(event.reason)}"
        case Won():
            return f"[{event.t:6.2f} s] #{event.branch} won; it changes {len(event.changed)} files"
        case RunEnded():
            return f"[{event.t:6.2f} s] {one_line(event.reason)}"
    return None


def _node(tree: Tree, node: Node) -> Text:
    text = Text()
    text.append(f"#{node.branch} ", style="bold")
    if node.pruned is not None:
        text.append(f"pruned ({node.pruned.cause})", style="red" if node.pruned.cause == "policy" else "dim")
    else:
        text.append(node.phase, style=_STYLES.get(node.phase, ""))
    until = tree.t if node.ended is None else node.ended
    text.append(f"  {node.tokens} tokens  {until - node.began:.1f} s", style="dim")
    if node.checked is not None:
        text.append(_tests(node.checked), style="green" if node.checked.passed else "yellow")
    if not node.released and node.clone is not None:
        text.append(f"  in {_line(node.clone)}", style="dim")
    detail = _detail(node)
    if detail:
        text.append(f"\n   {detail}", style="dim")
    return text


def _detail(node: Node) -> str:
    if node.pruned is not None:
        return _line(node.pruned.reason)
    if node.phase == "waiting" and node.judged is not None and node.judged.verdict == "ask":
        return f"asks: {_line(node.judged.reason)}"
    lines = [line for line in node.text.splitlines() if line.strip()]
    return _line(lines[-1]) if lines and node.phase == "proposing" else ""


def _foot(tree: Tree) -> Text:
    tokens = sum(node.tokens for node in tree.nodes.values())
    sandboxes = sum(node.clone is not None and not node.released for node in tree.nodes.values())
    foot = Text(f"round {tree.round + 1}, {tree.t:.1f} s, {tokens} tokens, {sandboxes} sandboxes", style="dim")
    if tree.ended is not None:
        foot.append(f"\n{_line(tree.ended.reason)}", style="bold green" if tree.won else "bold red")
    if tree.applied is not None:
        foot.append(f"\napplied to {_line(tree.applied)}", style="green")
    return foot


def _tests(checked: Checked) -> str:
    return "" if checked.tests is None else f"  {checked.passed_tests}/{checked.tests} tests"


def one_line(text: str) -> str:
    """A text on one line, without anything that could change a terminal or the order of what is read."""
    return _CONTROL.sub(" ", text.expandtabs())


def _line(text: str) -> str:
    plain = one_line(text.strip())
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3]}..."
