"""Qwen1.5-MoE and Qwen2-MoE (a shared expert), Qwen3-MoE (q and k normalised per head, no shared expert).

Both may keep some layers dense.
"""

from __future__ import annotations

from subten.models.families.common import (
    attention_spec,
    decoder_spec,
    refuse_sliding_window,
    router_spec,
)
from subten.models.families.config import MOST_PARTS, ConfigReader
from subten.models.families.family import Family
from subten.models.spec import AttentionSpec, DecoderSpec, DenseSpec, MoESpec


def _qwen2_moe(config: ConfigReader) -> DecoderSpec:
    attention = attention_spec(config, qkv_bias=config.flag("qkv_bias", True))
    shared = config.integer("shared_expert_intermediate_size")
    return _decoder(config, "qwen2_moe", attention, shared_intermediate_size=shared)


def _qwen3_moe(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    attention = attention_spec(config, qkv_bias=bias, output_bias=bias, qk_norm="per_head")
    return _decoder(config, "qwen3_moe", attention, shared_intermediate_size=None)


def _decoder(
    config: ConfigReader, family: str, attention: AttentionSpec, shared_intermediate_size: int | None
) -> DecoderSpec:
    refuse_sliding_window(config, on=config.flag("use_sliding_window", False))
    router = router_spec(config, renormalize=config.flag("norm_topk_prob", False))
    moe = MoESpec(router, config.integer("moe_intermediate_size"), shared_intermediate_size)
    step = config.integer("decoder_sparse_step", 1)
    dense_layers = config.integers("mlp_only_layers")
    feed_forwards = [
        moe
        if (layer + 1) % step == 0 and layer not in dense_layers
        else DenseSpec(config.integer("intermediate_size"))
        for layer in range(config.integer("num_hidden_layers", most=MOST_PARTS))
    ]
    return decoder_spec(config, family, attention, feed_forwards)


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe)
