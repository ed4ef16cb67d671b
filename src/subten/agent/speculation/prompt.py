"""What a model is told: the task, the check, the form of a plan, and the workspace as far as there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from subten.agent.speculation.check import Score
from subten.agent.speculation.plan import fenced
from subten.agent.speculation.proposer import Message

WORKSPACE_CHARACTERS = 24_000
"""Of the files shown; the rest is named only."""

_MOST_NAMES = 400
_SKIPPED = frozenset({".git", "__pycache__", ".venv", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache"})

_RULES = """\
You repair software. Answer with one plan: a fenced block that begins with ```bash, of shell commands that are run \
once, in the folder of the files below. Every command must succeed. Write files with here-documents \
(cat > FILE <<'EOF'), or change them with sed -i. There is no network. Do not run programs of your own: the check is \
run for you."""


def conversation(task: str, check: str, workspace: Path, characters: int = WORKSPACE_CHARACTERS) -> list[Message]:
    """The beginning of a run.

    Args:
        task: what is wanted, in words.
        check: what will be run, as it is named to people.
        workspace: a folder of text files; links are not followed.
        characters: of file contents shown; small files first, so that as many as possible are whole.
    """
    parts = [f"Task: {task}", f"Check: {check}", *_files(workspace, characters)]
    return [{"role": "system", "content": _RULES}, {"role": "user", "content": "\n\n".join(parts)}]


def feedback(script: str, check: str, score: Score) -> list[Message]:
    """A plan that ran and did not pass, and what is wanted next."""
    counted = "" if score.tests is None else f" ({score.passed_tests} of {score.tests} tests passed)"
    said = (
        f"The plan ran, and the check `{check}` failed{counted}. The end of its output:\n\n{score.output}\n\n"
        "The files are as your plan left them. Give one more plan that goes on from there."
    )
    return [{"role": "assistant", "content": fenced(script)}, {"role": "user", "content": said}]


def _files(workspace: Path, characters: int) -> Iterator[str]:
    texts, names = {}, []
    for path in _paths(workspace):
        names.append(path.relative_to(workspace).as_posix())
        text = _text(path, characters)
        if text is not None:
            texts[names[-1]] = text
    shown = set()
    for name in sorted(texts, key=lambda name: len(texts[name])):
        characters -= len(texts[name])
        if characters < 0:
            break
        shown.add(name)
    for name in names:
        if name in shown:
            yield f"File {name}:\n{texts[name]}"
    others = [name for name in names if name not in shown]
    if others:
        more = "" if len(others) <= _MOST_NAMES else f", and {len(others) - _MOST_NAMES} more"
        yield f"Other files: {', '.join(others[:_MOST_NAMES])}{more}"


def _paths(workspace: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(workspace):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(files):
            path = Path(here, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _text(path: Path, most: int) -> str | None:
    """The content of a text file that is not too large."""
    try:
        if path.stat().st_size > most:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
