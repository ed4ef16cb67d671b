"""From the stored tensors of a GGUF file to logical tensors with Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from subten.checkpoints.checkpoint import require_finite
from subten.checkpoints.gguf_architectures import MODEL_TENSORS, GGUFArchitecture
from subten.checkpoints.stored import StoredTensor
from subten.errors import CheckpointError, UnknownArchitectureError

# Frequency factors of a scaled RoPE: not a weight, the config states what they mean.
ROPE_FACTORS = "rope_freqs.weight"
# Elements dequantised at a time: 4 MiB of float32 stay in the cache of one core.
CHUNK_ELEMENTS = 1 << 20

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODEL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LogicalTensor:
    """How a tensor with a Hugging Face name is made of stored ones.

    `parts` are concatenated along the next to last dimension; `expert` picks one index of their leading dimension;
    `interleaved_heads` is the number of heads whose rows must be put back into Hugging Face order.
    """

    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    expert: int | None = None
    interleaved_heads: int | None = None


def logical_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    architecture: GGUFArchitecture,
    num_heads: int,
    num_kv_heads: int,
    num_experts: int | None,
) -> dict[str, LogicalTensor]:
    """Every logical tensor by its Hugging Face name.

    Raises UnknownArchitectureError where a stored tensor is none of the architecture's, CheckpointError where its
    shape contradicts the numbers of heads or experts.
    """
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture.interleaved_rope else {}
    joined = {stem: target for target, stems in architecture.joined.items() for stem in stems}
    tensors: dict[str, LogicalTensor] = {}
    for tensor in stored.values():
        if tensor.name == ROPE_FACTORS:
            continue
        prefix, stem, kind = _split_name(tensor.name)
        if prefix is None and stem in MODEL_TENSORS:
            tensors[f"{MODEL_TENSORS[stem]}.{kind}"] = LogicalTensor(tensor.shape, (tensor,))
        elif prefix is not None and stem in architecture.experts:
            _require_experts(path, tensor, num_experts)
            for expert in range(tensor.shape[0]):
                name = f"{prefix}{architecture.experts[stem].format(expert=expert)}.{kind}"
                tensors[name] = LogicalTensor(tensor.shape[1:], (tensor,), expert=expert)
        elif prefix is not None and stem in joined:
            _require_experts(path, tensor, num_experts)
            target = joined[stem]
            if stem == architecture.joined[target][0]:
                tensors[f"{prefix}{target}.{kind}"] = _join(path, stored, tensor, architecture.joined[target])
        elif prefix is not None and stem in architecture.layers:
            name = f"{prefix}{architecture.layers[stem]}.{kind}"
            tensors[name] = _layer_tensor(path, tensor, stem, heads.get(stem))
        else:
            raise UnknownArchitectureError(
                f"{path}: tensor {tensor.name} is not part of the architecture {architecture.model_type}"
            )
    return tensors


def num_layers(stored: Mapping[str, StoredTensor]) -> int:
    """How many layers the stored tensors belong to."""
    return len({match[1] for name in stored if (match := _LAYER_TENSOR.fullmatch(name))})


def load_logical(tensor: LogicalTensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read, dequantise and order one logical tensor; CheckpointError where it holds NaN or infinite values."""
    parts = [_dequantise(part, tensor.expert, name, dtype) for part in tensor.parts]
    values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
    if tensor.interleaved_heads is not None:
        # llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart: convert_hf_to_gguf.py stores
        # row (half, pair) of a head at (pair, half).
        pairs = tensor.shape[0] // tensor.interleaved_heads // 2
        values = values.reshape(tensor.interleaved_heads, pairs, 2, -1).transpose(1, 2)
    return values.reshape(tensor.shape)


def read_plain(tensor: StoredTensor) -> torch.Tensor:
    """All values of a small stored tensor, as float32."""
    return torch.cat(list(_dequantised_chunks(tensor, 0, tensor.nbytes))).view(tensor.shape)


def _split_name(name: str) -> tuple[str | None, str, str]:
    """Hugging Face prefix of the layer or None, stem, and `weight` or `bias`; stem empty where nothing fits."""
    if match := _LAYER_TENSOR.fullmatch(name):
        return f"model.layers.{int(match[1])}.", match[2], match[3]
    if match := _MODEL_TENSOR.fullmatch(name):
        return None, match[1], match[2]
    return None, "", ""


def _layer_tensor(path: Path, tensor: StoredTensor, stem: str, heads: int | None) -> LogicalTensor:
    if heads is not None and tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has {tensor.shape[0]} rows, which {heads} heads can't share in pairs"
        )
    shape = tensor.shape
    if stem == "ffn_gate_inp_shexp" and len(shape) == 1:
        shape = (1, *shape)  # llama.cpp drops the dimension of size one
    return LogicalTensor(shape, (tensor,), interleaved_heads=heads)


def _join(
    path: Path, stored: Mapping[str, StoredTensor], first: StoredTensor, stems: tuple[str, ...]
) -> LogicalTensor:
    names = [first.name.replace(stems[0], stem) for stem in stems]
    parts = tuple(stored[name] for name in names if name in stored)
    if len(parts) < len(stems) or any(part.shape != first.shape for part in parts):
        raise CheckpointError(f"{path}: tensors {' and '.join(names)} must both be there, in one shape")
    experts, rows, columns = first.shape
    return LogicalTensor((experts, rows * len(parts), columns), parts)


def _require_experts(path: Path, tensor: StoredTensor, num_experts: int | None) -> None:
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}, expected [{num_experts}, out, in]"
        )


def _dequantise(part: StoredTensor, expert: int | None, name: str, dtype: torch.dtype) -> torch.Tensor:
    shape, nbytes = part.shape, part.nbytes
    if expert is not None:
        shape, nbytes = shape[1:], nbytes // shape[0]
    result = torch.empty(shape, dtype=dtype)
    flat = result.view(-1)
    done = 0
    for chunk in _dequantised_chunks(part, (expert or 0) * nbytes, nbytes):
        flat[done : done + chunk.numel()] = require_finite(chunk, name, part.path, dtype)
        done += chunk.numel()
    return result


def _dequantised_chunks(part: StoredTensor, start: int, nbytes: int) -> Iterator[torch.Tensor]:
    """The values of a byte range of whole blocks, in order, a chunk at a time."""
    kind = gguf.GGMLQuantizationType[part.type]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    chunk_bytes = CHUNK_ELEMENTS // block_elements * block_bytes
    for position in range(start, start + nbytes, chunk_bytes):
        buffer = part.read(position, min(chunk_bytes, start + nbytes - position))
        if part.type in _PLAIN_TYPES:
            yield torch.frombuffer(buffer, dtype=_PLAIN_TYPES[part.type])
        else:
            # As one row: `gguf.dequantize` works on 16 rows at a time, in Python. A damaged scale may overflow;
            # the caller reports what comes of it.
            with np.errstate(all="ignore"):
                values = gguf.dequantize(np.frombuffer(buffer, np.uint8).reshape(1, -1), kind)
            yield torch.from_numpy(values.reshape(-1))
