"""Damaged files: one clear sentence for each defect, and never another exception, whatever the bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saved_models import save_folder
from tiny_tokenizers import add_byte_level_bpe

from subten.checkpoints import open_checkpoint
from subten.checkpoints.checkpoint import Checkpoint
from subten.errors import CheckpointError, ModelNotFoundError, StorageError, SubtenError


def read_everything(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    for name in sorted(checkpoint.names()):
        assert checkpoint.load(name).shape == checkpoint.shape(name)
    assert checkpoint.fingerprint
    return checkpoint


def raises(error: type[SubtenError], message: str, path: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        read_everything(path)
    assert "\n" not in str(caught.value)


# ---- safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write_safetensors(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("keep", [0, 3, 8, 40, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    raises(CheckpointError, "truncated", folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header of .* is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "holds a JSON list where an object is expected"),
        ({"a\n": entry(0, 32, shape=[8])}, r"damaged: 'a\\n' is no tensor name"),
        ({"a": 1}, "header entry of tensor a is malformed"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "header entry of tensor a is malformed"),
        ({"a": entry(0, 16, shape=[-4])}, "header entry of tensor a is malformed"),
        ({"a": entry(0, 16, shape=["4"])}, "header entry of tensor a is malformed"),
        ({"a": entry(0, 16, dtype=7)}, "header entry of tensor a is malformed"),
        ({"a": entry(0, 16, dtype="F4")}, "unknown type F4"),
        ({"a": entry(0, 12)}, r"needs 16 bytes, its offsets are \[0, 12\]"),
        ({"a": entry(16, 0)}, r"its offsets are \[16, 0\]"),
        ({"a": entry(-16, 0)}, r"its offsets are \[-16, 0\]"),
        ({"a": entry(2**62, 2**62 + 16)}, "begins at byte"),
        ({"a": entry(16, 32)}, "begins at byte 16 of the data, expected 0"),
        ({"a": entry(0, 16), "b": entry(8, 24)}, "begins at byte 8 of the data, expected 16"),
        ({"a": entry(0, 64, shape=[16])}, "header describes .* bytes, the file has"),
        ({}, "header describes .* bytes, the file has"),
    ],
)
def test_corrupt_safetensors_header(header: Any, message: str, folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", header, bytes(32))
    raises(CheckpointError, message, folder)


def test_absurd_header_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    raises(CheckpointError, "its header claims 18446744073709551615 bytes", folder)


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    raises(CheckpointError, "has no config.json", folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{not json", "config.json is not valid JSON"), ("[1]", "holds a JSON list")]
)
def test_config_that_is_no_json_object(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    raises(CheckpointError, message, folder)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_missing_shard(folder: Path) -> None:
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"})
    raises(CheckpointError, "lacks 1 of 2 shards .*: model-00002-of-00002.safetensors", folder)


def test_index_that_names_a_tensor_the_shard_lacks(folder: Path) -> None:
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"})
    raises(CheckpointError, "says that model-00001-of-00002.safetensors holds c, but it does not", folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../model-00001-of-00002.safetensors"}])
def test_index_without_a_weight_map(weight_map: Any, folder: Path) -> None:
    write_index(folder, weight_map)
    raises(CheckpointError, "has no weight_map from tensor names to file names", folder)


def test_file_cut_short_after_opening(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"is truncated: it ends inside tensor b"):
        checkpoint.load("b")
    path.unlink()
    with pytest.raises(StorageError, match="can't be read: No such file"):
        checkpoint.load("b")


# ---- GGUF


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("gguf")
    path = write_gguf(save_folder("llama", root), root / "model.gguf", add_tokenizer=add_byte_level_bpe("smollm"))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_empty_gguf(path: Path) -> None:
    path.touch()
    raises(CheckpointError, "is empty", path)


@pytest.mark.parametrize("keep", [2, 4, 7, 20, 30, 100, 5000, -1])
def test_truncated_gguf(keep: int, path: Path, gguf_bytes: bytes) -> None:
    path.write_bytes(gguf_bytes[:keep])
    raises(CheckpointError, "truncated|is no GGUF file", path)


def test_wrong_magic(path: Path, gguf_bytes: bytes) -> None:
    path.write_bytes(b"GGML" + gguf_bytes[4:])
    raises(CheckpointError, "begins with b'GGML' instead of b'GGUF'", path)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_version_or_byte_order(version: int, path: Path, gguf_bytes: bytes) -> None:
    path.write_bytes(gguf_bytes[:4] + struct.pack("<I", version) + gguf_bytes[8:])
    raises(CheckpointError, f"has GGUF version {version}", path)


@pytest.mark.parametrize("offset", [8, 16], ids=["tensors", "metadata"])
def test_absurd_counts(offset: int, path: Path, gguf_bytes: bytes) -> None:
    path.write_bytes(gguf_bytes[:offset] + b"\xff" * 8 + gguf_bytes[offset + 8 :])
    raises(CheckpointError, "it claims 18446744073709551615", path)


class Header:
    """A GGUF header written field by field."""

    def __init__(self, tensors: int = 0, entries: int = 0) -> None:
        self.bytes = b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)

    def string(self, text: bytes) -> Header:
        self.bytes += struct.pack("<Q", len(text)) + text
        return self

    def pack(self, layout: str, *values: float) -> Header:
        self.bytes += struct.pack(f"<{layout}", *values)
        return self

    def tensor(self, name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> Header:
        return self.string(name).pack(f"I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (Header(entries=1).string(b"\xff").pack("II", 4, 0), "a metadata key is not UTF-8"),
        (Header(entries=1).string(b"\x07").pack("II", 4, 0), r"damaged: '\\x07' is no name"),
        (Header(tensors=1).tensor(b"a\nb", (8,), 0, 0), r"damaged: 'a\\nb' is no name"),
        (Header(entries=1).string(b"k").pack("IQ", 77, 0), "k has the unknown value type 77"),
        (Header(entries=1).string(b"k").pack("IIQ", 9, 9, 1), "k is an array of the unsupported value type 9"),
        (Header(entries=1).string(b"k").pack("IIQ", 9, 0, 2**60), "claims 1152921504606846976 values in k"),
        (Header(entries=1).string(b"k").pack("IIQ", 9, 8, 2**60), "claims 1152921504606846976 strings in k"),
        (Header(entries=1).string(b"k").pack("IQ", 8, 2**63), "claims 9223372036854775808 bytes of k"),
        (
            Header(entries=2).string(b"k").pack("II", 4, 0).string(b"k").pack("II", 4, 0),
            "metadata key k occurs twice",
        ),
        (
            Header(entries=1).string(b"general.alignment").pack("II", 4, 24),
            "general.alignment is 24, expected a power of two",
        ),
        (Header(tensors=1).string(b"t").pack("IQIQ", 0, 0, 0, 0), "tensor t has 0 dimensions"),
        (Header(tensors=1).string(b"t").pack("I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0), "tensor t has 5 dimensions"),
        (Header(tensors=1).tensor(b"t", (8,), 99, 0), "tensor t has the unknown tensor type 99"),
        (Header(tensors=1).tensor(b"t", (8,), 26, 0), "tensor t has type I32, which can't be dequantised"),
        (Header(tensors=1).tensor(b"t", (31,), 2, 0), "does not divide into blocks of 32 elements"),
        (Header(tensors=1).tensor(b"t", (0,), 0, 0), "does not divide"),
        (Header(tensors=1).tensor(b"t", (8,), 0, 32), "begins at byte 32 of the data, expected 0"),
        (Header(tensors=1).tensor(b"t", (2**40, 2**40), 0, 0), "tensor t ends at byte"),
        (
            Header(tensors=2).tensor(b"t", (8,), 0, 0).tensor(b"t", (8,), 0, 32),
            "tensor t occurs twice",
        ),
    ],
)
def test_corrupt_gguf_header(header: Header, message: str, path: Path) -> None:
    path.write_bytes(header.bytes + bytes(256))
    raises(CheckpointError, message, path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gguf_values_that_are_not_finite(value: float, path: Path, tmp_path: Path) -> None:
    weights = np.full(32, value, np.float32)
    write_gguf(save_folder("llama", tmp_path), path, override={"output_norm.weight": weights})
    raises(CheckpointError, r"tensor model.norm.weight holds NaN or infinite values", path)


def test_gguf_block_with_a_nan_scale(path: Path, tmp_path: Path) -> None:
    raw = np.full((32, 68), 0xFF, np.uint8)
    override = {"blk.0.attn_output.weight": (raw, gguf.GGMLQuantizationType.Q8_0)}
    write_gguf(save_folder("llama-wide-heads", tmp_path), path, override=override)
    raises(CheckpointError, r"tensor model.layers.0.self_attn.o_proj.weight holds NaN", path)


# ---- paths


@pytest.mark.parametrize("name", ["missing", "missing.gguf"])
def test_path_that_does_not_exist(name: str, tmp_path: Path) -> None:
    raises(ModelNotFoundError, "does not exist", tmp_path / name)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    raises(ModelNotFoundError, "holds neither safetensors nor a GGUF file", tmp_path)


def test_folder_with_two_gguf_files(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    raises(CheckpointError, r"holds 2 GGUF files; name one of them, such as a.gguf", tmp_path)


def test_file_of_another_kind(folder: Path) -> None:
    raises(ModelNotFoundError, r"model.safetensors is no .gguf file", folder / "model.safetensors")


# ---- whatever the bytes

Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn, size: int, header: int) -> Damage:
    """Flip a few bytes, mostly of the header, and sometimes cut the end off."""
    positions = draw(st.lists(st.one_of(st.integers(0, header - 1), st.integers(0, size - 1)), max_size=4))
    values = draw(st.binary(min_size=len(positions), max_size=len(positions)))
    keep = draw(st.one_of(st.just(size), st.integers(0, size)))

    def apply(data: bytes) -> bytes:
        changed = bytearray(data)
        for position, value in zip(positions, values, strict=True):
            changed[position] = value
        return bytes(changed[:keep])

    return apply


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    (folder / "config.json").write_text("{}")
    tensors = {"a": torch.ones(2, 3), "f": torch.ones(2, 3).to(torch.float8_e4m3fn), "f_scale": torch.ones(2, 1)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def fp8_bytes(fp8_folder: Path) -> bytes:
    return (fp8_folder / "model.safetensors").read_bytes()


def survives(read: Callable[[], object]) -> None:
    """Reading succeeds or raises one of our own errors, in one line."""
    message = ""
    try:
        read()
    except SubtenError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_a_gguf_file(data: st.DataObject, scratch: Path, gguf_bytes: bytes) -> None:
    path = scratch / "model.gguf"
    header = len(gguf_bytes) // 4
    path.write_bytes(data.draw(damages(len(gguf_bytes), header))(gguf_bytes))
    survives(lambda: read_everything(path).tokenizer())


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_a_safetensors_file(data: st.DataObject, fp8_folder: Path, fp8_bytes: bytes) -> None:
    header = 8 + int.from_bytes(fp8_bytes[:8], "little")
    (fp8_folder / "model.safetensors").write_bytes(data.draw(damages(len(fp8_bytes), header))(fp8_bytes))
    survives(lambda: read_everything(fp8_folder))


@settings(max_examples=200)
@given(header=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_as_header_and_config(header: Any, scratch: Path) -> None:
    folder = scratch / "json"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(header))
    write_safetensors(folder / "model.safetensors", header, bytes(16))
    survives(lambda: read_everything(folder))
