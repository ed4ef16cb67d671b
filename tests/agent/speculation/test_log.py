"""Events as lines of a file; the tree and what is shown of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from subten.agent.speculation import EventLog, after, describe, fold, one_line, read_log, render, replay
from subten.agent.speculation import events as kinds
from subten.agent.speculation.events import Event, from_json, to_json
from subten.agent.speculation.tree import Tree
from subten.errors import ParameterError, StorageError

VALUES = {
    "int": st.integers(0, 5),
    "float": st.floats(0, 1e6),
    "str": st.text(st.characters(codec=None)),
    "bool": st.booleans(),
    "int | None": st.none() | st.integers(0, 5),
    "float | None": st.none() | st.floats(0, 1e6),
    "str | None": st.none() | st.text(),
    "tuple[int, int] | None": st.none() | st.tuples(st.integers(0), st.integers(0)),
    "tuple[str, ...]": st.lists(st.text(), max_size=3).map(tuple),
}
EVERY_KIND = [kind for kind in vars(kinds).values() if isinstance(kind, type) and issubclass(kind, Event)][1:]


def an_event(kind: type[Event]) -> st.SearchStrategy[Event]:
    fields = {field.name: VALUES[str(field.type)] for field in dataclasses.fields(kind)}
    if kind is kinds.RunStarted:
        fields["version"] = st.just(kinds.VERSION)
    return st.builds(kind, **fields)


@given(st.sampled_from(EVERY_KIND).flatmap(an_event))
def test_an_event_is_a_line_and_back(event: Event) -> None:
    line = to_json(event)
    assert line.isascii()
    assert "\n" not in line
    assert from_json(line) == event


START = kinds.RunStarted(0.0, kinds.VERSION, "0", "fix it", "make test", "somebody", 4, 1, 0, 0.01)
RUN: list[Event] = [
    START,
    kinds.RoundStarted(0.0, 0),
    kinds.BranchStarted(0.1, 0, None, 0),
    kinds.BranchStarted(0.1, 1, None, 0),
    kinds.AnswerGrew(0.2, 0, "```bash\nrm -rf \x1b]0;title\x07 /srv\n", 7),
    kinds.Judged(0.3, 0, "stream", "deny", "protect_paths: /srv", "it deletes \x1b[2J\u202e/srv", (0, 9)),
    kinds.Pruned(0.3, 0, "policy", "it deletes \x1b[2J\u202e/srv", None),
    kinds.Released(0.4, 0, None, None),
    kinds.AnswerGrew(0.5, 1, "```bash\nls\n```\n", 9),
    kinds.Judged(0.5, 1, "whole", "allow", "default", "nothing", (0, 3)),
    kinds.PlanStarted(0.6, 1, "clone-1", "process: not a VM"),
    kinds.PlanRan(0.7, 1, 0, False, 0.1, "a\nb\n"),
    kinds.Checked(0.8, 1, False, True, 1.0, 3, 3, 0.2, "3 passed in 0.1s"),
    kinds.Checked(1.0, 1, True, True, 1.0, 3, 3, 0.2, "3 passed in 0.1s"),
    kinds.Won(1.0, 1, ("main.py",), (), "a diff"),
    kinds.Released(1.1, 1, "clone-1", 0.5),
    kinds.RunEnded(1.1, 1, "#1 passes the check"),
    kinds.Applied(1.2, "repo"),
]


def write(path: Path, events: list[Event]) -> Path:
    with EventLog(path) as log:
        for event in events:
            log.write(event)
    return path


def text(tree: Tree) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(render(tree))
    return captured.get()


def test_what_is_shown(tmp_path: Path) -> None:
    shown = text(fold(RUN))
    assert shown.startswith("fix it\nsomebody; check: make test\n")
    assert "#0 pruned (policy)  7 tokens" in shown
    assert "#1 won  9 tokens  0.9 s  3/3 tests" in shown
    assert shown.endswith("#1 passes the check\napplied to repo\n")
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_every_state_can_be_shown_and_a_replay_shows_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", RUN)
    tree = Tree()
    assert text(tree) == "nothing has begun\n"
    for event, (replayed, state) in zip(RUN, replay(path), strict=True):
        tree = after(tree, event)
        assert replayed == event
        assert text(state) == text(tree)


def test_costs_add_up_along_a_branch() -> None:
    tree = fold([*RUN[:-2], kinds.BranchStarted(2.0, 2, 1, 1), kinds.AnswerGrew(2.1, 2, "x", 10)])
    assert tree.cost(1) == pytest.approx(0.1 + 0.2 + 0.2 + 9 * 0.01)
    assert tree.cost(2) == pytest.approx(tree.cost(1) + 0.1)


def test_lines_for_a_log() -> None:
    lines = [line for line in map(describe, RUN) if line is not None]
    assert lines[0] == "[  0.00 s] round 1"
    assert "#0 deny (stream): it deletes" in lines[1]
    assert all(line == one_line(line) for line in lines)
    assert lines[-1] == "[  1.10 s] #1 passes the check"


def test_a_run_that_was_killed_has_left_what_happened(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", RUN)
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    assert read_log(path) == RUN[:-1]


LINE = to_json(START)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no events"),
        (f"{LINE}\nnothing\n", ":2 is no event of a run: it is not valid JSON"),
        (f"{LINE}\n[]\n", ":2 is no event of a run: it is not a JSON object"),
        (f"{LINE}\n{{}}\n", ":2 is no event of a run: it has no `event` of a known kind"),
        (f'{LINE}\n{{"event": "round_started"}}\n', "a round_started has the keys t, round"),
        (
            f'{LINE}\n{{"event": "round_started", "t": 0, "round": "1"}}\n',
            "`round` of a round_started must be of type",
        ),
        (f'{LINE}\n{{"event": "round_started", "t": true, "round": 1}}\n', "`t` of a round_started must be of type"),
        (f"{LINE}\n{LINE}\n", "begins with its only run_started"),
        (f"{to_json(RUN[1])}\n", ":1 is no event of a run: a log begins with"),
        (f"{LINE}\n{to_json(RUN[4])}\n", ":2 is no event of a run: branch 0 has not begun"),
        (f"{to_json(dataclasses.replace(START, version=2))}\n", "it is of version 2; this program reads version 1"),
        (f"{LINE}\n\u00e9\n", "not ASCII"),
        (
            f'{LINE}\n{{"event": "branch_started", "t": 0, "branch": 0, "parent": 7, "round": 0}}\n',
            "branch 7 has not begun",
        ),
    ],
)
def test_what_is_no_log(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StorageError, match=words.replace("[", r"\[").replace("(", r"\(")) as caught:
        read_log(path)
    assert str(path) in str(caught.value)


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be read"):
        read_log(tmp_path / "nothing")
    with pytest.raises(StorageError, match="can't be written"):
        EventLog(tmp_path / "no" / "folder")


def test_a_run_that_never_begins_leaves_the_log_of_another(tmp_path: Path) -> None:
    path = write(tmp_path / "log", RUN)
    before = path.read_bytes()
    write(path, [])
    assert path.read_bytes() == before
    write(path, RUN[:1])
    assert read_log(path) == RUN[:1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_once() -> None:
    with EventLog(Path("/dev/full")) as log, pytest.raises(StorageError, match="can't be written: No space left"):
        log.write(RUN[0])


@pytest.mark.parametrize("line", ["1", "null", '{"event": 5}', '{"event": ["run_started"]}', "{" * 100_000])
def test_lines_that_are_no_events(line: str) -> None:
    with pytest.raises(ParameterError):
        from_json(line)


def test_every_kind_has_its_effect() -> None:
    assert {type(event) for event in RUN} | {kinds.Asked} == set(EVERY_KIND)
    for kind in EVERY_KIND:
        assert kind.kind
