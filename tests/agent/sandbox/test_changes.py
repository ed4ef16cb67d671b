"""What leaves a sandbox: a diff that git takes, and changes that reach no file outside the folder they are for."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subten.agent.sandbox import Change, Changes, Clone, Entry, Refusal, applying
from subten.agent.sandbox.workspace import Workspace, gather
from subten.errors import SandboxError


def copy_of(workspace: Path, place: Path) -> Path:
    subprocess.run(["cp", "-a", str(workspace), str(place)], check=True)
    return place


def content_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split("/")[0] == ".git":
            continue
        if path.is_symlink():
            found[name] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = ("x" if os.access(path, os.X_OK) else "file", path.read_bytes())
    return found


EDIT = """
sed -i 's/two/zwei/' notes.txt; printf 'no newline' >> notes.txt; rm data.bin; chmod -x run.sh
mkdir -p 'a b/c'; printf 'x\\n' > 'a b/c/new file'; printf '\\303\\251\\n' > "$(printf 'caf\\303\\251')"
ln -s ../src/main.py 'a b/rel'; rm link; ln -s notes.txt link; rm -r src; printf 'x' > src
"""


def test_the_real_folder_gets_the_same_changes(clone: Clone, workspace: Path, tmp_path: Path) -> None:
    assert clone.exec(EDIT).ok
    changes = clone.changes()
    assert changes.refused == ()
    by_git, by_us = copy_of(workspace, tmp_path / "git"), copy_of(workspace, tmp_path / "us")
    changes.apply(by_us)
    expected = {name: content for name, content in content_of(by_us).items() if name not in ("data.bin",)}
    assert expected["notes.txt"] == ("file", b"one\nzwei\nthree\nno newline")
    assert expected["src"] == ("file", b"x")
    assert expected["run.sh"][0] == "file"
    assert expected["a b/rel"] == ("link", b"../src/main.py")
    assert "data.bin" not in content_of(by_us)
    # A diff names binary files and has no content of them; git is given the rest.
    (by_git / "data.bin").unlink()
    text = Changes(tuple(change for change in changes.changed if change.path != "data.bin")).diff()
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], cwd=by_git, input=text.encode(), check=True)
    assert content_of(by_git) == expected
    assert "Binary files a/data.bin and /dev/null differ" in changes.diff()


def test_nothing_changed(clone: Clone) -> None:
    clone.exec("cat notes.txt > /dev/null; touch run.sh; mkdir x; rmdir x; echo x > y; rm y")
    assert clone.changes() == Changes(())
    assert clone.changes().diff() == ""


ESCAPES = """
ln -s /etc absolute; ln -s ../../etc above; ln -s . here; ln -s here/../../etc through; mkdir d; ln -s ../.. d/up
ln -s ../notes.txt d/fine; mkdir -p sub/.git/hooks; echo evil > sub/.git/hooks/post-checkout; echo evil > .git/config
ln -s .git/config git; mkfifo fifo; mkdir locked; echo x > locked/x; chmod 0 locked; echo x > secret; chmod 0 secret
"""


def test_escapes_are_not_exported(clone: Clone) -> None:
    assert clone.exec(ESCAPES).ok
    changes = clone.changes()
    assert {change.path for change in changes.changed} == {"here", "d", "d/fine", "locked", "sub"}
    assert {refusal.path for refusal in changes.refused} == {
        *("absolute", "above", "through", "d/up", "git", "fifo", "secret"),
    }


def test_links_in_the_real_folder_are_not_followed(clone: Clone, workspace: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "main.py").write_text("print('hello')\n")
    real = copy_of(workspace, tmp_path / "real")
    clone.exec("echo pwned > src/main.py; echo pwned > notes.txt")
    changes = clone.changes()
    (real / "src" / "main.py").unlink()
    (real / "src").rmdir()
    (real / "src").symlink_to(outside)
    with pytest.raises(SandboxError, match=r"src/main\.py can't be changed"):
        changes.apply(real)
    (real / "src").unlink()
    (real / "src").mkdir()
    (real / "src" / "main.py").symlink_to(outside / "main.py")
    with pytest.raises(SandboxError, match=r"src/main\.py has changed since"):
        changes.apply(real)
    assert (outside / "main.py").read_text() == "print('hello')\n"
    assert (real / "notes.txt").read_text() == "one\ntwo\nthree\n"


def test_conflicts_leave_all_as_it_was(clone: Clone, workspace: Path, tmp_path: Path) -> None:
    clone.exec("echo theirs > notes.txt; echo new > new.txt; rm run.sh")
    changes = clone.changes()
    for number, conflict in enumerate(
        (
            lambda real: (real / "notes.txt").write_text("mine\n"),
            lambda real: (real / "new.txt").write_text("mine\n"),
            lambda real: (real / "run.sh").unlink(),
        )
    ):
        real = copy_of(workspace, tmp_path / str(number))
        conflict(real)
        before = content_of(real)
        with pytest.raises(SandboxError, match="has changed since the sandbox was made; nothing was written"):
            changes.apply(real)
        assert content_of(real) == before


def frames(*heads: dict[str, object]) -> list[tuple[bytes, bytes]]:
    return [(b"f", json.dumps({"mode": 0o104755, "kind": "file", **head}).encode()) for head in heads]


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "x\0y", "..", ".git/x", "a/.git/hooks/x", "./x"]
)
def test_a_guest_that_lies_about_paths(path: str) -> None:
    workspace = Workspace()
    changes = gather(frames({"path": path}), workspace)
    workspace.close()
    assert changes.changed == ()
    assert [refusal.path for refusal in changes.refused] == [path]


def test_a_guest_that_plants_a_link_under_its_own_files(tmp_path: Path) -> None:
    workspace = Workspace()
    changes = gather(frames({"path": "a", "kind": "link", "target": "b"}, {"path": "a/x"}), workspace)
    workspace.close()
    assert [change.path for change in changes.changed] == ["a"]
    assert changes.refused == (Refusal("a/x", "its path leads through something that is no folder"),)


def test_modes_carry_no_special_bits(tmp_path: Path) -> None:
    workspace = Workspace()
    changes = gather([*frames({"path": "x"}), (b"d", b"content")], workspace)
    workspace.close()
    changes.apply(tmp_path)
    assert (tmp_path / "x").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "x").read_bytes() == b"content"


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b'{"path": 1, "kind": "file", "mode": 0}', b"\xff", b"[" * 9999]
)
def test_a_guest_that_sends_no_head(payload: bytes) -> None:
    workspace = Workspace()
    with pytest.raises(SandboxError, match="broke the protocol"):
        gather([(b"f", payload)], workspace)
    workspace.close()


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All below a folder, with modes."""
    found = {}
    for path in folder.rglob("*"):
        content = os.fsencode(path.readlink()) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return found


def every_kind_of_change(folder: Path) -> Changes:
    """Fills a folder, and changes it in every way that there is."""
    (folder / "old" / "deep").mkdir(parents=True)
    (folder / "old" / "deep" / "x").write_bytes(b"goes")
    (folder / "kept").mkdir(mode=0o755)
    (folder / "kept" / "y").write_bytes(b"before")
    (folder / "kept" / "y").chmod(0o640)
    (folder / "turns").write_bytes(b"a file")
    (folder / "back").mkdir()
    (folder / "link").symlink_to("turns")
    (folder / "repo").mkdir()
    (folder / "repo" / ".git").touch()

    def file(content: bytes) -> Entry:
        return Entry("file", 0o644, content)

    empty = Entry("folder", 0o755)
    return Changes(
        (
            Change("back", empty, file(b"a file now")),
            Change("kept", empty, Entry("folder", 0o700)),
            Change("kept/y", Entry("file", 0o640, b"before"), Entry("file", 0o755, b"after")),
            Change("kept/z", None, file(b"new")),
            Change("link", Entry("link", 0o777, b"turns"), Entry("link", 0o777, b"kept/y")),
            Change("new", None, empty),
            Change("new/below", None, empty),
            Change("new/below/w", None, file(b"new, and deep")),
            Change("old", empty, None),
            Change("old/deep", empty, None),
            Change("old/deep/x", file(b"goes"), None),
            Change("repo", empty, None),
            Change("turns", file(b"a file"), empty),
            Change("turns/inside", None, file(b"where a file was")),
        )
    )


AFTER = {
    **{"back": b"a file now", "kept": b"", "kept/y": b"after", "kept/z": b"new", "link": b"kept/y"},
    **{"new": b"", "new/below": b"", "new/below/w": b"new, and deep"},
    **{"repo": b"", "repo/.git": b"", "turns": b"", "turns/inside": b"where a file was"},
}


def test_all_kinds_of_changes_are_made(tmp_path: Path) -> None:
    every_kind_of_change(tmp_path).apply(tmp_path)
    assert {path: content for path, (_, content) in tree(tmp_path).items()} == AFTER
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kept" / "y").stat().st_mode) == 0o755


class FailingOS:
    """The module `os`, of which one call in a row of those that write fails."""

    WRITES = frozenset({"fchmod", "fsync", "link", "mkdir", "rename", "rmdir", "symlink", "unlink"})

    def __init__(self, fails: int, *, links: bool = True) -> None:
        self.left = fails
        self._links = links

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name == "link" and not self._links:
            return self._no_link
        return functools.partial(self._call, real) if name in self.WRITES else real

    def _call(self, real: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **more)

    def _no_link(self, *_arguments: Any, **_more: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("links", [True, False])
def test_whichever_write_fails_all_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    refused = 0
    for fails in itertools.count():
        folder = tmp_path / str(fails)
        changes = every_kind_of_change(folder)
        before = tree(folder)
        failing = FailingOS(fails, links=links)
        monkeypatch.setattr(applying, "os", failing)
        try:
            changes.apply(folder)
        except SandboxError as error:
            told = str(error)
        else:
            told = ""
        if failing.left >= 0:
            break
        after = tree(folder)
        if told.endswith("No space left on device; nothing was changed"):
            refused += 1
            assert told.startswith("the changes can't be written: ")
            assert after == before
        elif told:
            # The last names to go: all changes have been made by then.
            assert re.search(r"the changes were made, but .*\.(old|new) can't be removed: No space left", told)
            assert {path: after[path][1] for path in AFTER} == AFTER
        else:
            # A file that can't have a second name is copied.
            assert {path: content for path, (_, content) in after.items()} == AFTER
    assert refused > 20


def test_what_can_not_be_taken_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "stays").touch()

    def refuse(*_arguments: Any, **_more: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(applying.os, "unlink", refuse)
    wanted = Changes(
        (
            Change("a", None, Entry("file", 0o644, b"")),
            Change("b", Entry("folder", 0o755), Entry("file", 0o644, b"")),
        )
    )
    with pytest.raises(
        SandboxError, match=r"written: b: Is a directory; could not be taken back: a, \.\w+\.new, \.\w+\.new$"
    ):
        wanted.apply(tmp_path)


def test_a_full_disk_leaves_all_as_it_was(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", full], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (full / "first").write_bytes(b"before")
        changes = Changes(
            (
                Change("first", Entry("file", 0o644, b"before"), Entry("file", 0o644, b"after" * 1000)),
                Change("second", None, Entry("file", 0o644, b"x" * 100_000)),
            )
        )
        with pytest.raises(SandboxError, match=r"second: No space left on device; nothing was changed"):
            changes.apply(full)
        assert {path.name: path.read_bytes() for path in full.iterdir()} == {"first": b"before"}
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "kept").touch()
    changes = Changes((Change("x", Entry("folder", 0o755), Entry("file", 0o644, b"")),))
    with pytest.raises(SandboxError, match="can't be written"):
        changes.apply(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(SandboxError, match="can't be opened"):
        changes.apply(tmp_path / "missing")
