"""Write a model folder of transformers as GGUF, the way convert_hf_to_gguf.py of llama.cpp does.

Names come from the tables of the package `gguf`, so they are independent of the ones under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

GGUF_NAMES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
}
INTERLEAVED = {"llama", "granitemoe"}


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of llama.cpp's conversion/llama.py: from rotated halves to rotated neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    add_tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    override: dict[str, Any] | None = None,
) -> Path:
    """Write `folder` (config.json, model.safetensors) to `path`, matrices as `kind`, vectors as F32.

    `override` replaces GGUF tensors by name, with a numpy array or with a pair of raw bytes and their type.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = GGUF_NAMES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    if add_tokenizer is not None:
        add_tokenizer(writer)
    for name, tensor in _gguf_tensors(load_file(folder / "model.safetensors"), config, architecture):
        data = tensor.float().numpy().squeeze()
        if override and name in override:
            replacement = override[name]
            raw, raw_kind = replacement if isinstance(replacement, tuple) else (replacement, None)
            writer.add_tensor(name, raw, raw_dtype=raw_kind)
        elif data.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if width := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if width := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if config["model_type"] == "granitemoe":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _gguf_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], architecture: str
) -> Iterable[tuple[str, torch.Tensor]]:
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def rename(name: str) -> str:
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        return renamed

    if config["rope_parameters"]["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        stem = name.split(".")[-2]
        if ".experts." in name:
            prefix, _, rest = name.partition(".experts.")
            merged = f"{prefix}.experts.{rest.partition('.')[2]}"
            if config["model_type"] == "mixtral":
                layer = name.split(".")[2]
                merged = f"layers.{layer}.feed_forward.experts.{stem}.weight"
            stacked = experts.setdefault(merged, [])
            stacked.append(tensor)
            assert int(rest.split(".")[0]) == len(stacked) - 1, "experts must come in order"
            if len(stacked) == (config.get("num_local_experts") or config["num_experts"]):
                yield rename(merged), torch.stack(stacked)
        elif stem == "input_linear":
            layer = name.split(".")[2]
            gate, up = tensor.split(config["intermediate_size"], dim=-2)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif stem in heads and architecture in INTERLEAVED:
            yield rename(name), permute(tensor, heads[stem])
        else:
            yield rename(name), tensor


def llama3_factors(config: dict[str, Any]) -> torch.Tensor:
    """The loop of `LlamaModel.generate_extra_tensors` in llama.cpp's conversion/llama.py."""
    rope = config["rope_parameters"]
    dim = config["head_dim"]
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
