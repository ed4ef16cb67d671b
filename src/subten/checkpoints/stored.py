"""Tensors as byte ranges of files, and the fingerprint computed from them.

Files are read, not mapped: a file that is cut short while it is in use then gives an error instead of SIGBUS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from subten.errors import CheckpointError, StorageError

# A fingerprint must be cheap on a model of 18000 expert tensors on a slow disk, and still touch every layer.
FINGERPRINT_TENSORS = 1024
FINGERPRINT_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its type name as the format spells it, its shape (rows first), where its bytes are."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def read(self, start: int = 0, nbytes: int | None = None) -> bytearray:
        """`nbytes` bytes of the tensor from byte `start` on (by default all the rest).

        Raises CheckpointError where the file ends earlier, StorageError where it can't be read.
        """
        wanted = self.nbytes - start if nbytes is None else nbytes
        buffer = bytearray(wanted)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start)
                view = memoryview(buffer)
                done = 0
                while done < wanted and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise StorageError(f"{self.path} can't be read: {error.strerror or error}") from error
        if done < wanted:
            raise CheckpointError(f"{self.path} is truncated: it ends inside tensor {self.name}")
        return buffer


def fingerprint(tensors: Iterable[StoredTensor]) -> str:
    """Hex sha256 that tells one set of weights from another without reading all of it.

    Covers name, type, shape and size of every tensor, and the first, middle and last 256 bytes of at most 1024 of
    them, evenly spaced in name order. File names and the distribution over files do not count.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    digest = hashlib.sha256()
    for tensor in ordered:
        digest.update(f"{tensor.name}\0{tensor.type}\0{tensor.shape}\0{tensor.nbytes}\n".encode())
    step = max(1, -(-len(ordered) // FINGERPRINT_TENSORS))
    for tensor in ordered[::step]:
        length = min(FINGERPRINT_SAMPLE_BYTES, tensor.nbytes)
        for start in (0, (tensor.nbytes - length) // 2, tensor.nbytes - length):
            digest.update(tensor.read(start, length))
    return digest.hexdigest()
