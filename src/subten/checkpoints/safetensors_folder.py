"""A Hugging Face model folder: config.json, one safetensors file or shards with an index, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from subten.checkpoints import fp8
from subten.checkpoints.checkpoint import require_finite
from subten.checkpoints.json_files import read_json_object
from subten.checkpoints.safetensors_header import read_safetensors_header
from subten.checkpoints.stored import StoredTensor, fingerprint
from subten.errors import CheckpointError, UnknownArchitectureError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OWN_PREFIX = "subten-"
"""Files beside the weights that are this project's own, such as a calibration, and hold none."""
TOKENIZER_NAME = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Vocabularies that transformers can make a tokenizer of. Where it finds none it makes one that knows no word."""
FP8_TYPE = "F8_E4M3"
WEIGHT_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8_TYPE: fp8.E4M3,
}
FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
BLOCK_SUFFIX = "_scale_inv"
CHANNEL_SUFFIX = "_scale"
# Static scales of the *activations*, which only a kernel that multiplies in FP8 needs.
ACTIVATION_SUFFIXES = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class _ScaledTensor:
    """A logical tensor: the stored one, and for FP8 the stored scale that belongs to it."""

    stored: StoredTensor
    scale: StoredTensor | None = None


@dataclass(frozen=True)
class SafetensorsFolder:
    """The `Checkpoint` of a folder. Made by `open_safetensors_folder`."""

    path: Path
    config: Mapping[str, Any]
    block: tuple[int, int]
    stored: Mapping[str, StoredTensor] = field(repr=False)
    tensors: Mapping[str, _ScaledTensor] = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """See `Checkpoint.fingerprint`."""
        return fingerprint(self.stored.values())

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._tensor(name).stored.shape

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See `Checkpoint.load`."""
        tensor = self._tensor(name)
        values = _read(tensor.stored)
        if tensor.scale is not None:
            values = self._dequantise(values, tensor.scale)
        return require_finite(values, name, self.path, dtype)

    def fp8_scales(self, name: str) -> fp8.FP8Scales | None:
        """See `Checkpoint.fp8_scales`."""
        tensor = self._tensor(name)
        if tensor.scale is None or len(tensor.stored.shape) < 2:
            return None
        if not tensor.scale.name.endswith(BLOCK_SUFFIX):
            return "channel"
        return "block" if self.block == fp8.DEFAULT_BLOCK else None

    def load_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Checkpoint.load_fp8`."""
        kind, tensor = self.fp8_scales(name), self._tensor(name)
        if kind is None or tensor.scale is None:
            raise CheckpointError(f"{self.path} holds no tensor {name} in FP8")
        codes = _read(tensor.stored)
        scale = require_finite(_read(tensor.scale), tensor.scale.name, self.path, torch.float32)
        if fp8.has_nan(codes):
            raise CheckpointError(f"{self.path}: tensor {name} holds NaN or infinite values; the file is damaged")
        if kind == "channel":
            *leading, _ = tensor.stored.shape
            scale = scale.reshape(()).expand(leading).contiguous() if scale.numel() == 1 else scale.reshape(leading)
        return codes, scale

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `Checkpoint.tokenizer`."""
        # Two seconds of imports that reading weights does not need.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # tokenizer.json is complete. AutoTokenizer of transformers 5 would rebuild the tokenizer by the class that
        # tokenizer_config.json names and lose what differs: SmolLM2 names GPT2Tokenizer, which joins digits.
        complete = (self.path / TOKENIZER_NAME).is_file()
        if not complete and not any((self.path / name).is_file() for name in OTHER_TOKENIZERS):
            raise CheckpointError(
                f"the tokenizer in {self.path} can't be loaded: there is no {TOKENIZER_NAME}, which a model folder "
                "needs beside its weights"
            )
        loader = PreTrainedTokenizerFast if complete else AutoTokenizer
        try:
            tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
                str(self.path), local_files_only=True, trust_remote_code=False
            )
            # Some settings are looked at only when a text is read.
            words = tokenizer("a b")["input_ids"]
        # Damaged tokenizer files surface as anything from KeyError to the bare Exception of the Rust library.
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise CheckpointError(f"the tokenizer in {self.path} can't be loaded: {reason}") from error
        if not words:
            raise CheckpointError(
                f"the tokenizer in {self.path} has no vocabulary; the file is damaged or incomplete"
            )
        return tokenizer

    def _tensor(self, name: str) -> _ScaledTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} holds no tensor {name}") from None

    def _dequantise(self, codes: torch.Tensor, scale: StoredTensor) -> torch.Tensor:
        factors = _read(scale)
        if scale.name.endswith(BLOCK_SUFFIX):
            return fp8.dequantise_blocks(codes, factors, self.block)
        return fp8.dequantise_channels(codes, factors)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder that may hold weights, sorted."""
    return sorted(file for file in path.glob("*.safetensors") if not file.name.startswith(OWN_PREFIX))


def open_safetensors_folder(path: Path) -> SafetensorsFolder:
    """Open a folder with config.json and safetensors weights; reads headers only.

    Raises CheckpointError where a file is missing, damaged or inconsistent with the others,
    UnknownArchitectureError where the weights are quantised in a way that is not supported.
    """
    if not (path / CONFIG_NAME).is_file():
        raise CheckpointError(f"{path} has no {CONFIG_NAME}; a model folder needs one beside its weights")
    config = read_json_object(path / CONFIG_NAME)
    block = _quantisation_block(path, config)
    stored = _read_stored(path)
    return SafetensorsFolder(path, config, block, stored, _pair_scales(path, stored, block))


def _quantisation_block(path: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return fp8.DEFAULT_BLOCK
    if not isinstance(quantisation, dict) or quantisation.get("quant_method") not in FP8_METHODS:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UnknownArchitectureError(
            f"{path} is quantised with {method!r}; supported are FP8 weights ({', '.join(FP8_METHODS)}) and GGUF"
        )
    match quantisation.get("weight_block_size"):
        case None:
            return fp8.DEFAULT_BLOCK
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise CheckpointError(f"{path}: weight_block_size is {other!r}, expected two positive integers")


def _read_stored(path: Path) -> dict[str, StoredTensor]:
    if (path / INDEX_NAME).is_file():
        return _read_shards(path)
    if (path / SINGLE_NAME).is_file():
        return read_safetensors_header(path / SINGLE_NAME)
    files = weight_files(path)
    if len(files) != 1:
        raise CheckpointError(f"{path} holds {len(files)} safetensors files and no {INDEX_NAME} that joins them")
    return read_safetensors_header(files[0])


def _read_shards(path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(path / INDEX_NAME).get("weight_map")
    # A plain file name only: an index must not lead out of the model's folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard == Path(shard).name for shard in weight_map.values()
    ):
        raise CheckpointError(f"{path / INDEX_NAME} has no weight_map from tensor names to file names")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shards)} shards named in {INDEX_NAME}: {', '.join(missing[:3])}"
        )
    headers = {shard: read_safetensors_header(path / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(f"{path / INDEX_NAME} says that {shard} holds {name}, but it does not")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _pair_scales(path: Path, stored: Mapping[str, StoredTensor], block: tuple[int, int]) -> dict[str, _ScaledTensor]:
    tensors = {}
    folded: set[str] = set()
    for name, tensor in stored.items():
        scale = None
        if tensor.type == FP8_TYPE:
            scale = _scale_of(path, stored, tensor, block)
            stem = name.removesuffix("weight")
            folded.update([scale.name, *(stem + suffix for suffix in ACTIVATION_SUFFIXES)])
        tensors[name] = _ScaledTensor(tensor, scale)
    return {name: tensor for name, tensor in tensors.items() if name not in folded}


def _scale_of(
    path: Path, stored: Mapping[str, StoredTensor], weight: StoredTensor, block: tuple[int, int]
) -> StoredTensor:
    by_block = stored.get(weight.name + BLOCK_SUFFIX)
    scale = by_block or stored.get(weight.name + CHANNEL_SUFFIX)
    if scale is None:
        raise CheckpointError(
            f"{path}: FP8 tensor {weight.name} has no scale; expected {weight.name}{CHANNEL_SUFFIX} "
            f"or {weight.name}{BLOCK_SUFFIX}"
        )
    if by_block:
        fits = scale.shape == fp8.block_scale_shape(weight.shape, block) if len(weight.shape) > 1 else False
    else:
        fits = fp8.channel_scale_fits(weight.shape, scale.shape)
    if not fits:
        wanted = f"blocks of {block[0]}x{block[1]}" if by_block else "one scale per output channel"
        raise CheckpointError(
            f"{path}: scale {scale.name} of shape {list(scale.shape)} does not fit {weight.name} of shape "
            f"{list(weight.shape)} ({wanted})"
        )
    return scale


def _read(tensor: StoredTensor) -> torch.Tensor:
    if tensor.type not in WEIGHT_TYPES:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has type {tensor.type}; weights can be {', '.join(WEIGHT_TYPES)}"
        )
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=WEIGHT_TYPES[tensor.type])
    return torch.frombuffer(tensor.read(), dtype=WEIGHT_TYPES[tensor.type]).view(tensor.shape)
