"""A Hugging Face config synthesised from the metadata of a GGUF file.

The keys are those that the converters of llama.cpp write (conversion/base.py and the classes beside it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from subten.checkpoints.gguf_architectures import GGUFArchitecture
from subten.checkpoints.gguf_header import GGUFHeader
from subten.checkpoints.gguf_tensors import ROPE_FACTORS, num_layers, read_plain
from subten.errors import CheckpointError, UnknownArchitectureError

# Llama 3.1 to 3.3: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json. GGUF keeps only the factors
# that follow from these and from the scale.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Metadata:
    """The metadata below `<architecture>.`, checked for type as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.prefix = metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list):
            raise UnknownArchitectureError(
                f"{self.path}: {self.prefix}.{key} differs between layers, which is not supported"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self.path}: {self.prefix}.{key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number, as the shortest decimal that rounds to the stored float32."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.path}: {self.prefix}.{key} is {value!r}, expected a positive number")
        return _decimal(value)


def config_from_gguf(path: Path, header: GGUFHeader, architecture: GGUFArchitecture) -> dict[str, Any]:
    """The config of a GGUF file in the form of a Hugging Face `config.json`.

    Raises CheckpointError where the metadata lack a value or contradict the tensors, UnknownArchitectureError where
    they ask for something that is not supported.
    """
    metadata = _Metadata(path, header.metadata)
    _refuse_unsupported(path, metadata)
    hidden_size = metadata.integer("embedding_length")
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := metadata.integer(key, head_dim)) != head_dim:
            raise UnknownArchitectureError(
                f"{path}: {metadata.prefix}.{key} is {other} where the head dimension is {head_dim}; "
                "they must be equal"
            )
    layers = metadata.integer("block_count")
    if layers != num_layers(header.tensors):
        raise CheckpointError(
            f"{path}: the metadata say {layers} layers, the tensors are of {num_layers(header.tensors)}"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path} holds no tensor token_embd.weight")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(path, metadata, header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": _token_id(path, header, "bos", embedding.shape[0]),
        "eos_token_id": _token_id(path, header, "eos", embedding.shape[0]),
    }
    # qwen2 and qwen2moe have biases by definition; elsewhere the config says so.
    if "blk.0.attn_output.bias" in header.tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_down.bias" in header.tensors:
        config["mlp_bias"] = True
    for key, (name, default) in architecture.keys.items():
        value = metadata.get(key)
        config[name] = default if value is None else value if isinstance(value, bool) else metadata.number(key)
    if architecture.expert_count is not None:
        config |= _expert_config(metadata, header, architecture.expert_count)
    return config


def _token_id(path: Path, header: GGUFHeader, role: str, vocab_size: int) -> int | None:
    value = header.metadata.get(key := f"tokenizer.ggml.{role}_token_id")
    if value is not None and (not isinstance(value, int) or not 0 <= value < vocab_size):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a token below {vocab_size}")
    return value


def _refuse_unsupported(path: Path, metadata: _Metadata) -> None:
    if (parts := metadata.metadata.get("split.count", 1)) != 1:
        raise UnknownArchitectureError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first"
        )
    if metadata.get("attention.sliding_window"):
        raise UnknownArchitectureError(f"{path} has sliding-window attention, which is not supported")


def _expert_config(metadata: _Metadata, header: GGUFHeader, count_key: str) -> dict[str, Any]:
    if metadata.get("expert_gating_func") not in (None, gguf.ExpertGatingFuncType.SOFTMAX):
        raise UnknownArchitectureError(f"{metadata.path} routes by another function than softmax")
    config: dict[str, Any] = {
        count_key: metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }
    # Older files lack the widths, so the tensors are asked.
    for key, stem in (
        ("moe_intermediate_size", "ffn_gate_exps"),
        ("shared_expert_intermediate_size", "ffn_gate_shexp"),
    ):
        tensor = header.tensors.get(f"blk.0.{stem}.weight")
        if tensor is not None and len(tensor.shape) > 1:
            config[key] = tensor.shape[-2]
    return config


def _rope_scaling(path: Path, metadata: _Metadata, header: GGUFHeader, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(path, metadata, header, head_dim)
    kind = metadata.get("rope.scaling.type")
    if kind is None and metadata.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    match kind:
        case None | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
        case "yarn":
            return _yarn_scaling(path, metadata)
    raise UnknownArchitectureError(
        f"{path}: RoPE scaling {kind!r} is not supported; supported are none, linear, yarn and llama3"
    )


def _yarn_scaling(path: Path, metadata: _Metadata) -> dict[str, Any]:
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if metadata.get(key) not in (None, 1.0):
            raise UnknownArchitectureError(f"{path}: {metadata.prefix}.{key} other than 1 is not supported")
    return {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(path: Path, metadata: _Metadata, header: GGUFHeader, head_dim: int) -> dict[str, Any]:
    """The parameters of llama3 scaling from the factors that follow from them, verified by computing them again."""
    stored = read_plain(header.tensors[ROPE_FACTORS]).view(-1)
    factor = _decimal(float(stored.max()))
    theta = metadata.number("rope.freq_base", 10000.0)
    computed = _llama3_factors(theta, head_dim, factor)
    if stored.shape != computed.shape or not torch.allclose(stored, computed, rtol=1e-3):
        raise UnknownArchitectureError(
            f"{path}: the RoPE factors in {ROPE_FACTORS} are not those of llama3 scaling, the only kind supported"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> torch.Tensor:
    """What the wavelength of each rotary pair is multiplied by: `_compute_llama3_parameters` of transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (2 * math.pi * theta**exponents)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).to(torch.float32)


def _decimal(value: float) -> float:
    """GGUF stores float32: 1e-05 comes back as 9.999999747378752e-06. The shortest decimal is what was meant."""
    return float(str(np.float32(value)))
