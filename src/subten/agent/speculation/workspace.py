"""Changes of a clone: what of them is forbidden, and the same in another clone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from subten.agent.sandbox import Change, Changes, Clone
from subten.errors import SandboxError

FOLDER = "/workspace"
"""Where every clone has its copy of the workspace."""


def protected_change(changes: Changes, protected: Sequence[str]) -> tuple[str, str] | None:
    """The first change at, below or above a protected path, with that path; None where there is none.

    The policy reads what a plan says it does; this is what it did. New folders and empty files are no harm.
    """
    for change in changes.changed:
        path = f"{FOLDER}/{change.path}"
        for guarded in protected:
            inside = path == guarded or path.startswith(f"{guarded}/")
            above = guarded.startswith(f"{path}/")
            if (inside and _matters(change)) or (above and _ends_folder(change)):
                return change.path, guarded
    return None


def replant(changes: Changes, clone: Clone) -> None:
    """Make the same changes in a clone whose workspace is as the template put it there.

    Raises:
        SandboxError: it can't be done.
    """
    changed = changes.changed
    _each(clone, "rm -rf --", (change.path for change in changed if change.before is not None and _goes(change)))
    _each(clone, "mkdir -p --", (change.path for change in changed if change.after and change.after.kind == "folder"))
    files = {c.path: c.after for c in changed if c.after is not None and c.after.kind == "file"}
    if files:
        clone.put({path: entry.content for path, entry in files.items()})
    modes = {c.path: c.after.mode for c in changed if c.after is not None and c.after.kind != "link"}
    for mode in sorted(set(modes.values())):
        # Folders that can't be entered come last, deepest first.
        same = sorted((path for path in modes if modes[path] == mode), reverse=True)
        _each(clone, f"chmod {mode:o} --", same)
    for change in changed:
        if change.after is not None and change.after.kind == "link":
            _run(clone, ["ln", "-sfn", "--", os.fsdecode(change.after.content), change.path], b"")


def _matters(change: Change) -> bool:
    if change.before is None:
        assert change.after is not None
        return change.after.kind == "link" or bool(change.after.content)
    if change.after is None:
        return True
    return (change.before.kind, change.before.content) != (change.after.kind, change.after.content)


def _ends_folder(change: Change) -> bool:
    return change.after is None or change.after.kind != "folder"


def _goes(change: Change) -> bool:
    return change.after is None or (change.before is not None and change.before.kind != change.after.kind)


def _each(clone: Clone, command: str, paths: Iterator[str] | Sequence[str]) -> None:
    listed = b"\0".join(os.fsencode(path) for path in paths)
    if listed:
        _run(clone, f"xargs -0 {command}", listed)


def _run(clone: Clone, command: str | list[str], stdin: bytes) -> None:
    result = clone.exec(command, stdin=stdin)
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise SandboxError(f"changes can't be repeated in the clone {clone.name}: {said[-1]}")
