"""What a clone changed in its workspace: as data, as a diff, and applied to a real folder without following links."""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from subten.agent.sandbox.applying import goes, make_changes, parent_of
from subten.errors import SandboxError


@dataclass(frozen=True)
class Entry:
    """Something in a folder.

    Attributes:
        kind: "file", "link" or "folder".
        mode: permission bits.
        content: of a file; of a link its target; of a folder nothing.
    """

    kind: str
    mode: int
    content: bytes = b""

    def head(self, path: str) -> bytes:
        """The JSON that announces it on the stream to a guest."""
        head: dict[str, str | int] = {"path": path, "kind": self.kind, "mode": self.mode}
        if self.kind == "link":
            head["target"] = os.fsdecode(self.content)
        return json.dumps(head).encode()


@dataclass(frozen=True)
class Change:
    """One path that changed.

    Attributes:
        path: relative to the workspace.
        before: None where it is new.
        after: None where it was deleted.
    """

    path: str
    before: Entry | None
    after: Entry | None


@dataclass(frozen=True)
class Refusal:
    """Something in the sandbox that is not exported.

    Attributes:
        path: as the guest named it.
        reason: why not.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Changes:
    """All that changed, in the order of paths.

    Attributes:
        changed: what can be applied.
        refused: what is left out, with the reason.
    """

    changed: tuple[Change, ...]
    refused: tuple[Refusal, ...] = ()

    def diff(self) -> str:
        """For people and for `git apply`: a unified diff. Of files that are no UTF-8 text it names only the path."""
        return "".join(line for change in self.changed for line in _diff(change))

    def apply(self, folder: Path) -> None:
        """Make the same changes in a real folder, all of them or none.

        Nothing is written unless all paths there are still as they were in the workspace. No link on the way to a
        file is followed, a file is replaced in one step, and modes carry no set-user-ID or sticky bits.

        Raises:
            SandboxError: something there is different by now, or a link leads out; or it can't be written, and what
                was written has been taken back, or is named.
        """
        try:
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"{folder} can't be opened: {error.strerror or error}") from error
        try:
            become_folders = {change.path for change in self.changed if goes(change) and _is_folder(change.after)}
            for change in self.changed:
                # Nothing can be below what is a file or a link until then.
                if change.before is not None or become_folders.isdisjoint(_above(change.path)):
                    _require_unchanged(root, change)
            make_changes(root, self.changed)
        finally:
            os.close(root)


def _is_folder(entry: Entry | None) -> bool:
    return entry is not None and entry.kind == "folder"


def _above(path: str) -> Iterator[str]:
    return map(str, PurePosixPath(path).parents)


def read_entry(folder: int, name: str) -> Entry | None:
    """What a name in an opened folder is; None where there is nothing. No link is followed.

    Raises:
        OSError: it is something else than a file, a link or a folder, or can't be read.
    """
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode):
        return Entry("link", 0o777, os.fsencode(os.readlink(name, dir_fd=folder)))
    if stat.S_ISDIR(info.st_mode):
        return Entry("folder", mode)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{name} is neither a file nor a folder nor a link")
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return Entry("file", mode, file.read())


def _require_unchanged(root: int, change: Change) -> None:
    try:
        with parent_of(root, change.path) as folder:
            now = read_entry(folder, change.path.rsplit("/", 1)[-1])
    except FileNotFoundError:
        now = None
    except OSError as error:
        raise SandboxError(
            f"{change.path} can't be changed: {error.strerror or error}; nothing was written"
        ) from error
    before = change.before
    if (now is None) != (before is None) or (
        now and before and (now.kind, now.content) != (before.kind, before.content)
    ):
        raise SandboxError(f"{change.path} has changed since the sandbox was made; nothing was written")


# The diff

_KIND_BITS = {"file": 0o100000, "link": 0o120000}


def _diff(change: Change) -> Iterator[str]:
    before, after = (side if side and side.kind != "folder" else None for side in (change.before, change.after))
    if before is not None and after is not None and before.kind != after.kind:
        yield from _diff(Change(change.path, before, None))
        yield from _diff(Change(change.path, None, after))
        return
    if before == after:
        return  # folders: git knows none
    old, new = _quoted(f"a/{change.path}"), _quoted(f"b/{change.path}")
    yield f"diff --git {old} {new}\n"
    if before is None and after is not None:
        yield f"new file mode {_git_mode(after)}\n"
    elif after is None and before is not None:
        yield f"deleted file mode {_git_mode(before)}\n"
    elif before is not None and after is not None and _git_mode(before) != _git_mode(after):
        yield f"old mode {_git_mode(before)}\nnew mode {_git_mode(after)}\n"
    sides = [side.content if side else b"" for side in (before, after)]
    if sides[0] == sides[1]:
        return
    names = (old if before else "/dev/null", new if after else "/dev/null")
    old_lines, new_lines = (_lines(side) for side in sides)
    if old_lines is None or new_lines is None:
        yield f"Binary files {names[0]} and {names[1]} differ\n"
        return
    for line in difflib.unified_diff(old_lines, new_lines, *names):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(content: bytes) -> list[str] | None:
    """Lines as git counts them: they end with a line feed and nothing else. None where it is no text."""
    try:
        parts = content.decode().split("\n")
    except UnicodeDecodeError:
        return None
    if b"\0" in content:
        return None
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _git_mode(entry: Entry) -> str:
    return f"{_KIND_BITS[entry.kind] | (0 if entry.kind == 'link' else 0o755 if entry.mode & 0o100 else 0o644):o}"


def _quoted(path: str) -> str:
    """A path as git writes it: in quotes with octal escapes where it has unusual characters."""
    raw = os.fsencode(path)
    if all(32 < byte < 127 and byte not in b'"\\' for byte in raw.replace(b" ", b"_")):
        return path
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in raw) + '"'
