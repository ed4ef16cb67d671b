"""OLMoE 1B-7B: q and k normalised over their full width, and clipped in some versions."""

from __future__ import annotations

from subten.models.families.common import attention_spec, decoder_spec, every_layer, router_spec
from subten.models.families.config import ConfigReader
from subten.models.families.family import Family
from subten.models.spec import DecoderSpec, MoESpec


def _olmoe(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    router = router_spec(config, renormalize=config.flag("norm_topk_prob", False))
    return decoder_spec(
        config,
        "olmoe",
        attention_spec(
            config,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="full_width",
            clip_qkv=config.number("clip_qkv") if config.has("clip_qkv") else None,
        ),
        every_layer(config, MoESpec(router, config.integer("intermediate_size"))),
        default_norm_eps=1e-5,
    )


OLMOE = Family("olmoe", "OlmoeForCausalLM", _olmoe)
