"""Tiny random models of every family, built by transformers, with weights that leave nothing untested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from subten.kernels import select_kernels
from subten.kernels.attention.inputs import AttentionInputs
from subten.models import Decoder, StepInputs, load_weights, spec_from_config

CPU = torch.device("cpu")

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SHARED = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 6}

CASES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-biases-head_dim-llama3": (
        transformers.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 14, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama-tied-linear": (
        transformers.LlamaConfig,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        },
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3-biases-yarn": (
        transformers.Qwen3Config,
        {"head_dim": 32, "attention_bias": True, "rope_parameters": _YARN_ROPE},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 5}),
    "mixtral-head_dim-window": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 20, "sliding_window": 128},
    ),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**_SHARED, "num_experts_per_tok": 2}),
    "qwen2_moe-some-dense": (
        transformers.Qwen2MoeConfig,
        {
            **_SHARED,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 16,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe-some-dense": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 16,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "mlp_only_layers": [0, 2],
        },
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-clip": (
        transformers.OlmoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 0.7, "norm_topk_prob": True},
    ),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.21,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.8,
        },
    ),
    "granitemoe-biases": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 4, "attention_bias": True, "attention_multiplier": 0.3},
    ),
}
"""Name -> configuration class and what differs from `_SIZES`; the name begins with the model type."""


def build(case: str, seed: int = 0, **sizes: Any) -> transformers.PreTrainedModel:
    """A model of transformers with random float32 weights: logits of order one, biases and norms not trivial.

    `sizes` replace those of the case.
    """
    config_class, changes = CASES[case]
    config = config_class(**{**_SIZES, **changes, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            elif "router" in name or name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 3 / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                parameter.normal_(0, 1.3 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


@dataclass(frozen=True)
class MemoryCheckpoint:
    """The `Checkpoint` protocol over tensors in memory; `loaded` lists the names that were read."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    loaded: list[str]
    path: str = "tiny-model"
    fingerprint: str = "0"

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.loaded.append(name)
        return self.tensors[name].to(dtype)

    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        raise AssertionError("reading weights needs no tokenizer")


def decoder_of(checkpoint: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a checkpoint, on the CPU."""
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec, dtype=dtype, device=CPU)
    return Decoder(spec, weights, select_kernels(CPU))


def ragged_inputs(sequences: list[torch.Tensor]) -> StepInputs:
    """Complete sequences of token ids as one step without a cache."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    nothing = torch.zeros(len(sequences), dtype=torch.int32)
    return StepInputs(
        token_ids=torch.cat(sequences),
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        attention=AttentionInputs(
            query_start=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
            context_len=nothing,
            block_table=nothing[:, None],
            window_slot=nothing,
        ),
    )


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [length] of the tiny vocabulary."""
    return torch.randint(_SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
