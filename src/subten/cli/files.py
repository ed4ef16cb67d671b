"""Texts that a user names."""

from __future__ import annotations

from pathlib import Path

from subten.errors import StorageError


def read_text(path: Path) -> str:
    """The content of a UTF-8 file.

    Raises:
        StorageError: it can't be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
