"""Files that commands write: checked before the long work, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from subten.errors import StorageError


class OutputFile:
    """A file to be written later: each `write` replaces it in one step.

    Args:
        path: where it shall be; an existing file is replaced, but only by `write`. A link stays a link: what it leads
            to is replaced.

    Raises:
        StorageError: nothing could be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._target = path.expanduser().resolve()
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path} can't be written: {error}") from error
        self._staging = self._target.with_name(f".{self._target.name}.{os.getpid()}.tmp")
        if self._target.exists() and not self._target.is_file():
            raise StorageError(f"{path} can't be written: it is not a regular file")
        if self._target.exists() and _identity(self._target.stat()) in _standard_streams():
            raise StorageError(f"{path} can't be written: what is printed goes there; name another file")
        self._stage(b"")
        self._staging.unlink()

    def write(self, content: bytes) -> None:
        """Put the content in place.

        Raises:
            StorageError: it can't be written; a file that was there before is unchanged.
        """
        try:
            self._stage(content)
            self._staging.replace(self._target)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            self._staging.unlink(missing_ok=True)

    def _stage(self, content: bytes) -> None:
        try:
            self._staging.write_bytes(content)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path} can't be written: {error.strerror or error}")


def _standard_streams() -> set[tuple[int, int]]:
    """What stdout and stderr are: a file that one of them is redirected to would be lost when it is replaced."""
    found = set()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            found.add(_identity(os.fstat(descriptor)))
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
