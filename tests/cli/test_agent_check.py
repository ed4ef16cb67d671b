"""`subten agent check`: one verdict a line, and one sentence for what is wrong."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from subten.agent.policy import second_parser
from subten.cli import main


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text("protect_paths: [/w/v]\n", encoding="utf-8")
    return path


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def verdicts(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_command(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "check", "--policy", str(policy), "--cwd", "/w", "ls; rm -rf v"]) == 0
    (verdict,) = verdicts(capsys)
    assert verdict["decision"] == "deny"
    assert verdict["rule"] == "protect_paths: /w/v"
    assert verdict["span"] == [4, 12]
    assert set(verdict) == {"decision", "rule", "span", "reason"}


def test_standard_input_is_one_command(
    policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"cat <<'E'\nrm -rf /w/v\nE\n")
    assert main(["agent", "check", "--policy", str(policy)]) == 0
    assert [v["decision"] for v in verdicts(capsys)] == ["allow"]
    feed(monkeypatch, b"echo \xff\n")
    assert main(["agent", "check", "--policy", str(policy)]) == 0
    assert [v["decision"] for v in verdicts(capsys)] == ["ask"]


@pytest.mark.parametrize("command", [["check", "ls"], ["run", "--task", "t", "--check", "false"], ["mcp"]])
def test_a_policy_that_says_nothing_is_refused_everywhere(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    plans = ["--plans", str(tmp_path), "--workspace", str(tmp_path)] if command[0] == "run" else []
    assert main(["agent", *command, *plans, "--policy", str(empty)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(
        f"error: {empty}: the policy says nothing, so it would allow all that is known; it needs "
    )
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_many_commands(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = tmp_path / "commands.jsonl"
    commands.write_text('{"name": "a", "command": "ls"}\n\n{"command": "rm -rf /w/v"}\n', encoding="utf-8")
    assert main(["agent", "check", "--policy", str(policy), "--jsonl", str(commands)]) == 0
    found = verdicts(capsys)
    assert [(v.get("name"), v["decision"]) for v in found] == [("a", "allow"), (None, "deny")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"rm\n", "commands.jsonl:1 is not valid JSON"),
        (b'{"cmd": "ls"}\n', "commands.jsonl:1 must be an object with a text `command`"),
        (b"[]\n", "commands.jsonl:1 must be an object"),
    ],
)
def test_a_wrong_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, message: str) -> None:
    (tmp_path / "commands.jsonl").write_bytes(line)
    assert main(["agent", "check", "--jsonl", str(tmp_path / "commands.jsonl")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "--jsonl", "x"], "a COMMAND and --jsonl are both given"),
        (["--jsonl", "/nonexistent/x"], "can't be read"),
        (["ls", "--policy", "/nonexistent/x"], "can't be read"),
        (["ls", "--cwd", "here"], "must be an absolute path"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["agent", "check", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_missing_extra_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    second_parser._tools.cache_clear()
    try:
        assert main(["agent", "check", "ls"]) == 2
    finally:
        second_parser._tools.cache_clear()
    assert capsys.readouterr().err == (
        "error: judging shell commands needs tree-sitter-bash; install it with: pip install 'subten[agent]'\n"
    )
