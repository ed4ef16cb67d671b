"""Tasks for the agent engine: small repositories with a bug, tests that show it, and plans of known kinds."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from subten.errors import StorageError

KINDS = ("good", "wrong", "hanging", "denied")
"""Of plans: the tests pass after it; it runs and they fail; it or they do not end; the policy denies it."""

POLICY = "policy.yaml"
"""In the folder of the tasks."""


@dataclass(frozen=True)
class AgentTask:
    """One repository.

    Attributes:
        name: of its folder.
        kind: of its bug.
        text: what is wanted, in words.
        check: the command that says whether it is there.
        workspace: the folder with the sources and tests.
        plans: kind of plan -> its shell code.
    """

    name: str
    kind: str
    text: str
    check: str
    workspace: Path
    plans: Mapping[str, str]


def load_tasks(folder: Path) -> list[AgentTask]:
    """All tasks below a folder, by name.

    Raises:
        StorageError: there are none, or one lacks a file or a key.
    """
    names = sorted(path.parent.name for path in folder.glob("*/task.toml"))
    if not names:
        raise StorageError(f"{folder} holds no tasks, which are folders with a task.toml")
    return [_load(folder / name) for name in names]


def _load(folder: Path) -> AgentTask:
    path = folder / "task.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        plans = {kind: (folder / "plans" / f"{kind}.sh").read_text(encoding="utf-8") for kind in KINDS}
    except OSError as error:
        raise StorageError(f"{error.filename} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StorageError(f"{path} or a plan beside it is not what it must be: {error}") from error
    texts = [values.get(key) for key in ("kind", "text", "check")]
    if not all(isinstance(text, str) for text in texts):
        raise StorageError(f"{path} must have the texts kind, text and check")
    kind, text, check = (str(value) for value in texts)
    return AgentTask(folder.name, kind, " ".join(text.split()), check, folder / "repo", plans)
