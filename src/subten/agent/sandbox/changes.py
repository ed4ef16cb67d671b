"""What a clone changed in its workspace: as data, as a diff, and applied to a real folder without following links."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subten.errors import SandboxError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        """Make the same changes in a real folder.

        Nothing is written unless all paths there are still as they were in the workspace. No link on the way to a
        file is followed, a file is replaced in one step, and modes carry no set-user-ID or sticky bits.

        Raises:
            SandboxError: something there is different by now, or a link leads out; or it can't be written.
        """
        try:
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"{folder} can't be opened: {error.strerror or error}") from error
        try:
            for change in self.changed:
                _require_unchanged(root, change)
            # What goes, deepest first, makes room for what comes, topmost first.
            for change in sorted(self.changed, key=lambda change: change.path, reverse=True):
                if change.before is not None and _goes(change):
                    _remove(root, change.path, change.before)
            for change in sorted(self.changed, key=lambda change: change.path):
                if change.after is not None:
                    _write(root, change.path, change.after)
        except OSError as error:
            raise SandboxError(f"the changes can't be written to {folder}: {error}") from error
        finally:
            os.close(root)


def _goes(change: Change) -> bool:
    """Whether what was there must be removed first; a file is replaced by a file in one step."""
    assert change.before is not None
    kept = change.after is not None and "folder" not in (change.before.kind, change.after.kind)
    same_folder = change.after is not None and change.before.kind == change.after.kind == "folder"
    return not kept and not same_folder


@contextlib.contextmanager
def _parent(root: int, path: str) -> Iterator[int]:
    """The folder that holds a path, opened name by name; a link on the way is an error."""
    here = os.dup(root)
    try:
        for name in path.split("/")[:-1]:
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


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
        with _parent(root, change.path) as folder:
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


def _remove(root: int, path: str, before: Entry) -> None:
    with _parent(root, path) as folder:
        name = path.rsplit("/", 1)[-1]
        if before.kind != "folder":
            os.unlink(name, dir_fd=folder)
            return
        # It may hold what was never exported, such as .git: that stays.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)


def _write(root: int, path: str, entry: Entry) -> None:
    with _parent(root, path) as folder:
        name = path.rsplit("/", 1)[-1]
        if entry.kind == "folder":
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o777, dir_fd=folder)
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.fchmod(below, entry.mode & 0o777)
            os.close(below)
            return
        draft = f".{secrets.token_hex(8)}.new"
        try:
            if entry.kind == "link":
                os.symlink(entry.content, draft, dir_fd=folder)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(entry.content)
                    os.fchmod(file.fileno(), entry.mode & 0o777)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)
            raise


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
