"""What leaves a sandbox: a diff that git takes, and changes that reach no file outside the folder they are for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from subten.agent.sandbox import Change, Changes, Clone, Entry, Refusal
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


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "kept").touch()
    changes = Changes((Change("x", Entry("folder", 0o755), Entry("file", 0o644, b"")),))
    with pytest.raises(SandboxError, match="can't be written"):
        changes.apply(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(SandboxError, match="can't be opened"):
        changes.apply(tmp_path / "missing")
