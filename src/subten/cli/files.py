"""Texts that a user names or sends."""

from __future__ import annotations

import sys
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


def read_stdin() -> str:
    """All of the standard input, which is UTF-8 whatever the locale says, with the line ends of a text file.

    Raises:
        StorageError: it can't be read or is not UTF-8.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise StorageError(f"the standard input can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"the standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
