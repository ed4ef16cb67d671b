"""A mixture of experts of a few thousand parameters, with all that a model may have: shared expert, biases, gates."""

from __future__ import annotations

from subten.models.families import spec_from_config

TINY = spec_from_config(
    {
        "model_type": "qwen2_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
    }
)
