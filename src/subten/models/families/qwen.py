"""Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (no biases; q and k normalised per head)."""

from __future__ import annotations

from subten.models.families.common import attention_spec, decoder_spec, every_layer, refuse_sliding_window
from subten.models.families.config import ConfigReader
from subten.models.families.family import Family
from subten.models.spec import DecoderSpec, DenseSpec


def _qwen2(config: ConfigReader) -> DecoderSpec:
    refuse_sliding_window(config, on=config.flag("use_sliding_window", False))
    return decoder_spec(
        config,
        "qwen2",
        attention_spec(config, qkv_bias=True),
        every_layer(config, DenseSpec(config.integer("intermediate_size"))),
    )


def _qwen3(config: ConfigReader) -> DecoderSpec:
    refuse_sliding_window(config, on=config.flag("use_sliding_window", False))
    bias = config.flag("attention_bias", False)
    return decoder_spec(
        config,
        "qwen3",
        attention_spec(config, qkv_bias=bias, output_bias=bias, qk_norm="per_head", default_head_dim=128),
        every_layer(config, DenseSpec(config.integer("intermediate_size"))),
    )


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _qwen3)
