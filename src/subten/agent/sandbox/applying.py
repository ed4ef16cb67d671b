"""Changes made in a real folder: all of them, or none where one fails.

What needs room is written first, under other names beside its target. Then names change, one at a time, and what was
there before keeps another name until the last one has changed. No link is followed on the way to a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING

from subten.errors import SandboxError

if TYPE_CHECKING:
    from subten.agent.sandbox.changes import Change, Entry

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def parent_of(root: int, path: str) -> Iterator[int]:
    """The folder that holds a path, opened name by name.

    Args:
        root: the folder that the path is relative to, opened.
        path: with `/` between names.

    Raises:
        OSError: there is no such folder, or a link on the way.
    """
    here = os.dup(root)
    try:
        for name in path.split("/")[:-1]:
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def make_changes(root: int, changed: Sequence[Change]) -> None:
    """Make changes, whose paths must be as they were before.

    Args:
        root: the folder, opened.
        changed: the changes.

    Raises:
        SandboxError: one can't be made. The others were taken back; what could not be is named.
    """
    lost: list[str] = []
    path = ""
    try:
        with ExitStack() as undo:
            steps = _Steps(root, {change.path for change in changed if goes(change)}, undo, lost)
            coming, drafts = sorted(changed, key=lambda change: change.path), dict[str, str]()
            for change in coming:
                path = change.path
                if change.after is not None and change.after.kind != "folder":
                    drafts[path] = steps.draft(path, change.after)
            # What goes, deepest first, makes room for what comes, topmost first.
            for change in reversed(coming):
                path = change.path
                if goes(change):
                    assert change.before is not None
                    steps.remove(path, change.before)
            for change in coming:
                path = change.path
                if path in drafts:
                    steps.put(path, drafts[path], None if goes(change) else change.before)
                elif change.after is not None:
                    steps.put_folder(path, change.after.mode & 0o777)
            undo.pop_all()
    except OSError as error:
        rest = f"could not be taken back: {', '.join(dict.fromkeys(lost))}" if lost else "nothing was changed"
        raise SandboxError(f"the changes can't be written: {path}: {error.strerror or error}; {rest}") from error
    steps.forget()


def goes(change: Change) -> bool:
    """Whether what was there must be removed first; a file is replaced by a file in one step."""
    if change.before is None:
        return False
    kept = change.after is not None and "folder" not in (change.before.kind, change.after.kind)
    same_folder = change.after is not None and change.before.kind == change.after.kind == "folder"
    return not kept and not same_folder


class _Steps:
    """What is done, and how each of it is taken back."""

    def __init__(self, root: int, going: Set[str], undo: ExitStack, lost: list[str]) -> None:
        self._root, self._going, self._undo, self._lost = root, going, undo, lost
        self._kept: list[str] = []

    def draft(self, path: str, entry: Entry) -> str:
        """Write a file or a link under another name; that name."""
        draft = self._beside(path, "new")
        self._on_failure(draft, lambda: self._unlink(draft))
        with parent_of(self._root, draft) as folder:
            if entry.kind == "link":
                os.symlink(entry.content, _name(draft), dir_fd=folder)
                return draft
            with os.fdopen(os.open(_name(draft), _NEW, 0o600, dir_fd=folder), "wb") as file:
                file.write(entry.content)
                file.flush()
                os.fchmod(file.fileno(), entry.mode & 0o777)
                os.fsync(file.fileno())  # Some file systems find out only then that they are full.
        return draft

    def remove(self, path: str, before: Entry) -> None:
        """Remove what stands in the way. A folder may hold what was never exported, such as .git: then it stays."""
        if before.kind != "folder":
            aside = self._beside(path, "old")
            self._rename(path, aside)
            self._on_failure(path, lambda: self._rename(aside, path))
            self._kept.append(aside)
            return
        with parent_of(self._root, path) as folder:
            mode = _mode(folder, path)
            try:
                os.rmdir(_name(path), dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise
        self._on_failure(path, lambda: self._make_folder(path, mode))

    def put(self, path: str, draft: str, before: Entry | None) -> None:
        """Give a draft its name, in one step also where a file or link is there."""
        if before is None:
            self._rename(draft, path)
            self._on_failure(path, lambda: self._unlink(path))
            return
        kept = self._keep(path, before)
        self._rename(draft, path)
        self._on_failure(path, lambda: self._rename(kept, path))
        self._kept.append(kept)

    def put_folder(self, path: str, mode: int) -> None:
        """Make a folder, or change its mode."""
        with parent_of(self._root, path) as folder:
            try:
                os.mkdir(_name(path), 0o777, dir_fd=folder)
            except FileExistsError:
                was = _mode(folder, path)
                self._on_failure(path, lambda: self._set_mode(path, was))
            else:
                self._on_failure(path, lambda: self._remove_folder(path))
        self._set_mode(path, mode)

    def forget(self) -> None:
        """What was there before is wanted no more.

        Raises:
            SandboxError: some of it can't be removed.
        """
        for kept in self._kept:
            try:
                self._unlink(kept)
            except OSError as error:
                raise SandboxError(
                    f"the changes were made, but {kept} can't be removed: {error.strerror or error}"
                ) from error

    def _keep(self, path: str, before: Entry) -> str:
        """A second name for a file, or a copy of it where the file system has none; that name."""
        aside = self._beside(path, "old")
        try:
            with parent_of(self._root, path) as here, parent_of(self._root, aside) as there:
                os.link(_name(path), _name(aside), src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        except OSError:
            return self.draft(path, before)
        self._on_failure(aside, lambda: self._unlink(aside))
        return aside

    def _beside(self, path: str, kind: str) -> str:
        """A new name in the deepest folder above a path that is there and stays."""
        here, above = os.dup(self._root), ""
        try:
            for name in path.split("/")[:-1]:
                if f"{above}{name}" in self._going:
                    break
                try:
                    below = os.open(name, _FOLDER, dir_fd=here)
                except FileNotFoundError:
                    break
                os.close(here)
                here, above = below, f"{above}{name}/"
        finally:
            os.close(here)
        return f"{above}.{secrets.token_hex(8)}.{kind}"

    def _on_failure(self, path: str, take_back: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                take_back()
            except OSError:
                self._lost.append(path)

        self._undo.callback(attempt)

    def _rename(self, path: str, to: str) -> None:
        with parent_of(self._root, path) as here, parent_of(self._root, to) as there:
            os.rename(_name(path), _name(to), src_dir_fd=here, dst_dir_fd=there)

    def _unlink(self, path: str) -> None:
        with parent_of(self._root, path) as folder, contextlib.suppress(FileNotFoundError):
            os.unlink(_name(path), dir_fd=folder)

    def _make_folder(self, path: str, mode: int) -> None:
        with parent_of(self._root, path) as folder:
            os.mkdir(_name(path), 0o700, dir_fd=folder)
        self._set_mode(path, mode)

    def _remove_folder(self, path: str) -> None:
        with parent_of(self._root, path) as folder:
            os.rmdir(_name(path), dir_fd=folder)

    def _set_mode(self, path: str, mode: int) -> None:
        with parent_of(self._root, f"{path}/") as folder:
            os.fchmod(folder, mode)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _mode(folder: int, path: str) -> int:
    return stat.S_IMODE(os.stat(_name(path), dir_fd=folder, follow_symlinks=False).st_mode)
