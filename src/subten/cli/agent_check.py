"""`subten agent check`: what a policy says about shell commands. Nothing is run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from subten.errors import ParameterError, StorageError


def agent_check(
    command: Annotated[
        str | None, typer.Argument(metavar="COMMAND", help="Shell text [default: all of the standard input].")
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file [default: allow, and ask what is opaque].")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="File with one JSON object a line that has a `command`; - for standard input.")
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(help="Working directory the commands start in [default: this one].")
    ] = None,
) -> None:
    """Judge shell commands by a policy.

    Prints one JSON object for each: decision, rule, span, reason.
    """
    from subten.agent.policy import Policy, judge, load_policy

    if command is not None and jsonl is not None:
        raise ParameterError("a COMMAND and --jsonl are both given; one of them says what to judge")
    rules = Policy() if policy is None else load_policy(policy)
    folder = str(Path.cwd()) if cwd is None else cwd
    if not folder.startswith("/"):
        raise ParameterError(f"--cwd is '{folder}'; it must be an absolute path")
    if jsonl is not None:
        for number, line in enumerate(_read(jsonl).split(b"\n"), start=1):
            if line.strip():
                request = _request(line, f"{jsonl}:{number}")
                decision = judge(rules, request["command"], folder)
                names = {"name": request["name"]} if "name" in request else {}
                _print({**names, **decision.as_json()})
        return
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if command is None else command
    _print(judge(rules, text, folder).as_json())


def _print(verdict: dict[str, Any]) -> None:
    # Bytes that were no UTF-8 come back as escapes.
    print(json.dumps(verdict))


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if os.fspath(path) == "-" else path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error


def _request(line: bytes, where: str) -> dict[str, Any]:
    try:
        request = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("command"), str):
        raise ParameterError(f"{where} must be an object with a text `command`")
    return request
