"""The header of one safetensors file: parsed and checked before a byte of a tensor is read.

Format: 8 bytes little-endian header length, a JSON object `name -> {dtype, shape, data_offsets}`, then the data.
As in the reference implementation (https://github.com/huggingface/safetensors) the tensors must tile the data without
gap or overlap. Parsed here rather than by that library so that every defect gets its own sentence and tensors can be
read by byte range.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from subten.checkpoints.json_files import parse_json_object
from subten.checkpoints.stored import StoredTensor
from subten.errors import CheckpointError, StorageError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises CheckpointError where the header or the file's size is wrong, StorageError where it can't be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise CheckpointError(f"{path} is truncated: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header claims {length} bytes, "
                    f"the file has {size}"
                )
            text = file.read(length)
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error

    header = parse_json_object(text, f"the header of {path}")
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    tensors = {name: _stored_tensor(path, start, name, entry) for name, entry in header.items()}
    _require_tiling(path, start, size, tensors)
    return tensors


def _stored_tensor(path: Path, start: int, name: str, entry: Any) -> StoredTensor:
    if not name.isprintable():
        raise CheckpointError(f"{path} is damaged: {name!r} is no tensor name")
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(extent, int) and extent >= 0 for extent in shape
        ):
            pass
        case _:
            raise CheckpointError(f"{path}: the header entry of tensor {name} is malformed")
    if dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise CheckpointError(f"{path}: tensor {name} has the unknown type {dtype}; known are {known}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if not 0 <= begin <= end or end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name} of type {dtype} and shape {shape} needs {nbytes} bytes, "
            f"its offsets are [{begin}, {end}]"
        )
    return StoredTensor(name, dtype, tuple(shape), path, start + begin, nbytes)


def _require_tiling(path: Path, start: int, size: int, tensors: dict[str, StoredTensor]) -> None:
    position = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} begins at byte {tensor.offset - start} of the data, "
                f"expected {position - start}"
            )
        position += tensor.nbytes
    if position != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header describes {position} bytes, the file has {size}"
        )
