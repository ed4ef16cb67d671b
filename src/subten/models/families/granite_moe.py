"""Granite 3 MoE: multipliers on embedding, residual, attention scores and logits; experts stored stacked."""

from __future__ import annotations

from subten.models.families.common import attention_spec, decoder_spec, every_layer, router_spec
from subten.models.families.config import ConfigReader
from subten.models.families.family import ExpertNames, Family, TensorNames
from subten.models.spec import DecoderSpec, MoESpec


def _granite_moe(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    # Granite takes the top k first and the softmax afterwards, which is renormalisation.
    router = router_spec(config, renormalize=True)
    return decoder_spec(
        config,
        "granitemoe",
        attention_spec(config, qkv_bias=bias, output_bias=bias, scale=config.number("attention_multiplier", 1.0)),
        every_layer(config, MoESpec(router, config.integer("intermediate_size"))),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _granite_moe,
    TensorNames(
        experts=ExpertNames(
            router="block_sparse_moe.router.layer.weight",
            gate_up=("block_sparse_moe.input_linear.weight",),
            down="block_sparse_moe.output_linear.weight",
        )
    ),
)
