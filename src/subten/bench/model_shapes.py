"""Models by their geometry alone: what a step costs does not depend on what the weights are.

Configurations as their publishers have them on the Hugging Face hub, of the parts that a step's time depends on. The
context is as long as what is measured needs, which is no more than a longer table of angles. Two are not published:

- `mix-32b-a9b`: 8 experts, top 2, 32 billion parameters in all and 9 of them active, the least that is possible so.
- `seed-32b-a7b`: 32 billion, 7 active: that takes top 1 of 8, and a shared expert beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from subten.bench.terminal import names
from subten.checkpoints import open_checkpoint, resolve_model
from subten.models.families import spec_from_config
from subten.models.spec import DecoderSpec

MAX_POSITIONS = 131072

_COMMON = {"max_position_embeddings": MAX_POSITIONS, "hidden_act": "silu", "tie_word_embeddings": False}
_WIDE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_MIXTRAL = {**_WIDE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mix-32b-a9b": {**_MIXTRAL, "intermediate_size": 9728},
    "seed-32b-a7b": {
        **_WIDE,
        "model_type": "qwen2_moe",
        "qkv_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 9088,
        "shared_expert_intermediate_size": 4608,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "mixtral-8x7b": {**_MIXTRAL, "intermediate_size": 14336},
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
}

SHAPES: Mapping[str, DecoderSpec] = MappingProxyType(
    {name: spec_from_config({**_COMMON, **config}) for name, config in _CONFIGS.items()}
)
"""By name."""


def chosen_models(text: str) -> list[str]:
    """Shapes, or models by name or path, from the command line.

    Raises:
        ModelNotFoundError: a name that is neither a shape nor a model.
    """
    chosen = names(text)
    for name in chosen:
        if name not in SHAPES:
            resolve_model(name)
    return chosen


def spec_of(name: str) -> DecoderSpec:
    """Of a shape, or of a model without its weights.

    Raises:
        SubtenError: a subclass says what is wrong with the model.
    """
    if name in SHAPES:
        return SHAPES[name]
    return spec_from_config(open_checkpoint(resolve_model(name)).config)
