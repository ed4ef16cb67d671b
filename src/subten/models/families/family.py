"""What a family of models is: a reading of its configuration, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from subten.models.families.config import ConfigReader
from subten.models.spec import DecoderSpec


@dataclass(frozen=True)
class ExpertNames:
    """Names of the router and the experts.

    `gate_up` lists the tensors that, one below the other, make up an expert's gate and up projection. A name with
    ``{expert}`` stands for one tensor per expert, a name without for one tensor that stacks all experts.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str


@dataclass(frozen=True)
class SharedExpertNames:
    """Names of the expert that every token visits, and of its gate."""

    gate_up: tuple[str, ...]
    down: str
    gate: str


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names of a decoder's weights; the defaults are those that most families share.

    The names of a layer's tensors come after `layer`; those of projections are completed by ``.weight`` and
    ``.bias``. Names that a family's spec does not ask for are never looked up.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    output: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    post_attention_norm: str = "post_attention_layernorm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    experts: ExpertNames = ExpertNames(
        router="mlp.gate.weight",
        gate_up=("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        down="mlp.experts.{expert}.down_proj.weight",
    )
    shared_expert: SharedExpertNames = SharedExpertNames(
        gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        down="mlp.shared_expert.down_proj.weight",
        gate="mlp.shared_expert_gate.weight",
    )


@dataclass(frozen=True)
class Family:
    """One architecture of the Hugging Face hub."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """The entry of `architectures` in config.json that has the whole decoder, output projection included."""
    spec: Callable[[ConfigReader], DecoderSpec]
    names: TensorNames = field(default_factory=TensorNames)
