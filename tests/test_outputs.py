"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from subten.errors import StorageError
from subten.outputs import OutputFile


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_output_is_checked_first_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    output = OutputFile(path)
    assert names(tmp_path) == []
    output.write(b"[]")
    output.write(b"[1]")
    assert path.read_bytes() == b"[1]"
    assert names(tmp_path) == ["rows.json"]


def test_an_existing_file_is_untouched_until_the_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"old")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    output = OutputFile(link)
    assert path.read_bytes() == b"old"
    output.write(b"new")
    assert path.read_bytes() == b"new"
    assert link.is_symlink()
    assert names(tmp_path) == ["link.json", "rows.json"]


@pytest.mark.parametrize("name", ["missing/rows.json", "file/rows.json", "folder", "pipe"])
def test_where_nothing_can_be_written_is_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    with pytest.raises(StorageError, match=f"{name} can't be written: "):
        OutputFile(tmp_path / name)
    assert names(tmp_path) == before


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"old")
    output = OutputFile(path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="No space left on device"):
        output.write(b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["rows.json"]


def test_a_folder_that_is_there_meanwhile_is_an_error(tmp_path: Path) -> None:
    output = OutputFile(tmp_path / "rows.json")
    (tmp_path / "rows.json").mkdir()
    with pytest.raises(StorageError, match="can't be written: Is a directory"):
        output.write(b"one")
    assert names(tmp_path) == ["rows.json"]
