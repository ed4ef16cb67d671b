"""Mixtral 8x7B and 8x22B."""

from __future__ import annotations

from subten.models.families.common import (
    attention_spec,
    decoder_spec,
    every_layer,
    refuse_sliding_window,
    router_spec,
)
from subten.models.families.config import ConfigReader
from subten.models.families.family import ExpertNames, Family, TensorNames
from subten.models.spec import DecoderSpec, MoESpec


def _mixtral(config: ConfigReader) -> DecoderSpec:
    refuse_sliding_window(config, on=True)
    router = router_spec(config, renormalize=True)
    return decoder_spec(
        config,
        "mixtral",
        attention_spec(config),
        every_layer(config, MoESpec(router, config.integer("intermediate_size"))),
        default_norm_eps=1e-5,
        default_theta=1_000_000.0,
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _mixtral,
    TensorNames(
        experts=ExpertNames(
            router="block_sparse_moe.gate.weight",
            gate_up=(
                "block_sparse_moe.experts.{expert}.w1.weight",
                "block_sparse_moe.experts.{expert}.w3.weight",
            ),
            down="block_sparse_moe.experts.{expert}.w2.weight",
        )
    ),
)
