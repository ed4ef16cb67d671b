"""Tiny random models of every family, made and saved by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# case -> config class, what differs from COMMON
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**EXPERTS, "clip_qkv": 0.5}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
}


@cache
def tiny_model(case: str) -> transformers.PreTrainedModel:
    """The model of a case: norms and biases random too, so that no tensor can be left out unnoticed."""
    name, differences = CASES[case]
    config = getattr(transformers, f"{name}Config")(**COMMON | differences)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@cache
def _saved(case: str, root: Path) -> Path:
    folder = root / case
    tiny_model(case).save_pretrained(folder)
    return folder


def save_folder(case: str, root: Path) -> Path:
    """The folder `save_pretrained` writes for a case, made once per `root`."""
    return _saved(case, root)
