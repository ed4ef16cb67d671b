"""Llama 2 and 3, SmolLM2, and the many models that share their code."""

from __future__ import annotations

from subten.models.families.common import attention_spec, decoder_spec, every_layer
from subten.models.families.config import ConfigReader
from subten.models.families.family import Family
from subten.models.spec import DecoderSpec, DenseSpec


def _llama(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    return decoder_spec(
        config,
        "llama",
        attention_spec(config, qkv_bias=bias, output_bias=bias),
        every_layer(config, DenseSpec(config.integer("intermediate_size"), bias=config.flag("mlp_bias", False))),
    )


LLAMA = Family("llama", "LlamaForCausalLM", _llama)
