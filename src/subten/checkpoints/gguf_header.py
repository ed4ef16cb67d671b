"""The header of a GGUF file: metadata and tensor directory, parsed and checked before a tensor is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` has a reader too, but a damaged
length makes it loop for as long as the length says, a damaged offset makes it return other bytes, and a vocabulary of
49152 tokens takes it 20 times as long; here every length is checked against the bytes that are left. Block sizes
and dequantisation are that package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from subten.checkpoints.stored import StoredTensor
from subten.errors import CheckpointError, StorageError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # GGML_MAX_DIMS
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format, little-endian
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LENGTH_BYTES = 8
# name length, number of dimensions, type, offset: what a tensor's directory entry takes at least
_MIN_TENSOR_ENTRY = 8 + 4 + 4 + 8
_MIN_METADATA_ENTRY = 8 + 4 + 1


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata (Python scalars, strings and lists of either) and tensors of a GGUF file, shapes rows first."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises CheckpointError where it is no GGUF file of version 2 or 3 in little-endian order, or is truncated or
    damaged, or holds a tensor type that can't be dequantised; StorageError where it can't be read.
    """
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return _Parser(path, file, path.stat().st_size).header()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error


class _Parser:
    """A cursor over the header that never believes a length."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0

    def header(self) -> GGUFHeader:
        if self.size == 0:
            raise CheckpointError(f"{self.path} is empty")
        magic = self.file.read(len(MAGIC))
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
        self.position = len(MAGIC)
        version = self.scalar("<I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; little-endian files of version 2 and 3 can be read"
            )
        tensor_count = self.count("tensors", _MIN_TENSOR_ENTRY)
        metadata_count = self.count("metadata entries", _MIN_METADATA_ENTRY)

        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.name("a metadata key")
            if key in metadata:
                raise CheckpointError(f"{self.path} is damaged: metadata key {key} occurs twice")
            metadata[key] = self.value(self.scalar("<I"), key)

        entries = [self.tensor_entry() for _ in range(tensor_count)]
        return GGUFHeader(metadata, self.lay_out(entries, self.alignment(metadata)))

    def take(self, nbytes: int) -> bytes:
        data = self.file.read(nbytes)
        if len(data) < nbytes:
            raise CheckpointError(f"{self.path} is truncated: it ends inside the header, at byte {self.size}")
        self.position += nbytes
        return data

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, what: str, item_bytes: int) -> int:
        """A number of items that the rest of the file has room for."""
        value: int = self.scalar("<Q")
        if value * item_bytes > self.size - self.position:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: it claims {value} {what} in {self.size} bytes"
            )
        return value

    def string(self, what: str) -> str:
        data = self.take(self.count(f"bytes of {what}", 1))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: {what} is not UTF-8") from error

    def name(self, what: str) -> str:
        """A string that can stand in a message."""
        name = self.string(what)
        if not name.isprintable():
            raise CheckpointError(f"{self.path} is damaged: {name!r} is no name")
        return name

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _ARRAY:
            return self.array(key)
        raise CheckpointError(f"{self.path} is damaged: {key} has the unknown value type {kind}")

    def array(self, key: str) -> list[Any]:
        kind: int = self.scalar("<I")
        if kind == _STRING:
            length = self.count(f"strings in {key}", _LENGTH_BYTES)
            return [self.string(key) for _ in range(length)]
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            length = self.count(f"values in {key}", struct.calcsize(layout))
            return [value for (value,) in struct.iter_unpack(layout, self.take(length * struct.calcsize(layout)))]
        raise CheckpointError(f"{self.path}: {key} is an array of the unsupported value type {kind}")

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: {ALIGNMENT_KEY} is {alignment!r}, expected a power of two")
        return alignment

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first; GGUF writes the contiguous dimension first), type number, offset."""
        name = self.name("a tensor name")
        dims = self.scalar("<I")
        if not 1 <= dims <= MAX_DIMS:
            raise CheckpointError(f"{self.path} is damaged: tensor {name} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))[::-1]
        return name, shape, self.scalar("<I"), self.scalar("<Q")

    def lay_out(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, StoredTensor]:
        """Place the tensors; as in ggml they must follow each other, each padded to the alignment."""
        start = -(-self.position // alignment) * alignment
        expected = 0
        tensors: dict[str, StoredTensor] = {}
        for name, shape, type_number, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{self.path} is damaged: tensor {name} occurs twice")
            type_name, nbytes = self.storage(name, shape, type_number)
            if offset != expected:
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {name} begins at byte {offset} of the data, expected {expected}"
                )
            if start + offset + nbytes > self.size:
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name} ends at byte {start + offset + nbytes}, "
                    f"the file has {self.size}"
                )
            tensors[name] = StoredTensor(name, type_name, shape, self.path, start + offset, nbytes)
            expected = -(-(offset + nbytes) // alignment) * alignment
        return tensors

    def storage(self, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
        """Type name and size in bytes."""
        try:
            kind = gguf.GGMLQuantizationType(type_number)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name} has the unknown tensor type {type_number}") from None
        if not can_dequantise(kind):
            raise CheckpointError(f"{self.path}: tensor {name} has type {kind.name}, which can't be dequantised")
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_elements:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {list(shape)} does not divide into blocks of "
                f"{block_elements} elements ({kind.name})"
            )
        return kind.name, math.prod(shape) // block_elements * block_bytes


@cache
def can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether `gguf.dequantize` knows the type: asked by dequantising one block of zeros."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
