"""The copy of a folder that clones start with: what later changes are compared with, and what is not exported."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from subten.agent.sandbox.changes import Change, Changes, Entry, Refusal, read_entry
from subten.agent.sandbox.guest.agent import NEVER_EXPORTED
from subten.errors import SandboxError


class Workspace:
    """A private copy of a folder: links stay links, sockets and devices are left out. Empty without a source."""

    def __init__(self, source: Path | None = None) -> None:
        """Copy.

        Raises:
            SandboxError: the source can't be read.
        """
        self.root = Path(tempfile.mkdtemp(prefix="subten-"))
        self.folder = self.root / "workspace"
        self.folder.mkdir(mode=0o755)
        if source is not None:
            try:
                for path, entry in _entries(source):
                    _place(self.folder / path, entry)
            except OSError as error:
                self.close()
                raise SandboxError(f"{source} can't be copied into a sandbox: {error}") from error

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Everything in it: relative path and what is there, folders before their content."""
        return _entries(self.folder)

    def before(self, path: str) -> Entry | None:
        """What is at a relative path that leads through no link; None where there is nothing."""
        place = self.folder / path
        if not place.parent.is_dir():
            return None
        parent = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return read_entry(parent, place.name)
        finally:
            os.close(parent)

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.root, ignore_errors=True)


def gather(frames: Iterable[tuple[bytes, bytes]], workspace: Workspace) -> Changes:
    """What a guest sent as its changes, none of it trusted.

    Args:
        frames: `f` with a JSON head, then `d` with the bytes of a file.
        workspace: what was there before.

    Raises:
        SandboxError: the frames are not what a guest agent sends.
    """
    heads: dict[str, tuple[dict[str, Any], list[bytes]]] = {}
    content: list[bytes] = []
    for kind, payload in frames:
        if kind == b"f":
            head, content = _head(payload), []
            heads[head["path"]] = (head, content)
        else:
            content.append(payload)
    changed: list[Change] = []
    refused: list[Refusal] = []
    not_folders = {path for path, (head, _) in heads.items() if head["kind"] not in ("folder", "deleted")}
    for path in sorted(heads):
        head, parts = heads[path]
        reason = _objection(path, head, not_folders)
        if reason is not None:
            refused.append(Refusal(path, reason))
            continue
        after = _entry(head, b"".join(parts))
        before = workspace.before(path)
        if before != after:
            changed.append(Change(path, before, after))
    return Changes(tuple(changed), tuple(refused))


def _head(payload: bytes) -> dict[str, Any]:
    try:
        head = json.loads(payload)
        if (
            not isinstance(head["path"], str)
            or not isinstance(head["kind"], str)
            or not isinstance(head["mode"], int)
        ):
            raise TypeError
        os.fsencode(head["path"]), os.fsencode(head.get("target", ""))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SandboxError("the guest agent broke the protocol while it sent its changes") from error
    checked: dict[str, Any] = head
    return checked


def _objection(path: str, head: dict[str, Any], not_folders: set[str]) -> str | None:
    """Why something is not exported; None where it is."""
    names = path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        return "its path leads out of the workspace"
    if not NEVER_EXPORTED.isdisjoint(names):
        return "what is in .git would run on the host"
    if head["kind"] == "deleted":
        return None
    if any("/".join(names[:depth]) in not_folders for depth in range(1, len(names))):
        return "its path leads through something that is no folder"
    if head["kind"] == "link":
        return _link_objection(len(names) - 1, str(head.get("target", "")))
    if head["kind"] == "unreadable":
        return f"it can't be read: {head.get('target')}"
    return None if head["kind"] in ("file", "folder") else "it is neither a file nor a folder nor a link"


def _link_objection(depth: int, target: str) -> str | None:
    """A link may lead up only at its beginning and no further than the workspace.

    `x/..` is where x's own link leads, which no comparison of names can know.
    """
    names = PurePosixPath(target).parts
    ups = next((index for index, name in enumerate(names) if name != ".."), len(names))
    if not target or target.startswith("/") or "\0" in target or ups > depth or ".." in names[ups:]:
        return f"it is a link to '{target}', which may lead out of the workspace"
    return None if NEVER_EXPORTED.isdisjoint(names) else f"it is a link to '{target}', which leads into .git"


def _entry(head: dict[str, Any], content: bytes) -> Entry | None:
    if head["kind"] == "deleted":
        return None
    if head["kind"] == "link":
        return Entry("link", 0o777, os.fsencode(head["target"]))
    return Entry(head["kind"], head["mode"] & 0o777, content)


def _entries(folder: Path) -> Iterator[tuple[str, Entry]]:
    pending = [""]
    while pending:
        below = pending.pop()
        here = os.open(folder / below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in sorted(entry.name for entry in os.scandir(here)):
                mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    continue
                entry = read_entry(here, name)
                assert entry is not None
                path = f"{below}/{name}".lstrip("/")
                yield path, entry
                if entry.kind == "folder":
                    pending.append(path)
        finally:
            os.close(here)


def _place(path: Path, entry: Entry) -> None:
    if entry.kind == "link":
        path.symlink_to(os.fsdecode(entry.content))
    elif entry.kind == "folder":
        # The owner can always enter and write: the copy is removed again.
        path.mkdir()
        path.chmod(entry.mode & 0o777 | 0o700)
    else:
        path.write_bytes(entry.content)
        path.chmod(entry.mode & 0o777)
