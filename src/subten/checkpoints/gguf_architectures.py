"""The GGUF architectures that can be read, as data: their Hugging Face class and the names of their tensors.

GGUF names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Hugging Face names: those that
`save_pretrained` of transformers 5 writes, experts one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from subten.errors import UnknownArchitectureError

MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
DENSE_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
MLP_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
MLP_ROUTER = {"ffn_gate_inp": "mlp.gate"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """How one GGUF architecture maps to a Hugging Face one.

    `layers`: stem of a layer's tensor -> Hugging Face stem below `model.layers.N.`.
    `experts`: stem of a stacked expert tensor [experts, out, in] -> stem with an `{expert}` field.
    `joined`: Hugging Face stem -> GGUF stems whose stacked tensors are concatenated along `out`.
    `interleaved_rope`: the rows of Q and K were reordered for llama.cpp's interleaved RoPE and must be put back.
    `expert_count`: the config key of the number of experts, None for a dense model.
    `keys`: metadata key -> config key of what only this architecture has, with the value a missing key stands for.
    """

    model_type: str
    model_class: str
    layers: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved_rope: bool = False
    expert_count: str | None = None
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)


LLAMA = GGUFArchitecture("llama", "LlamaForCausalLM", {**ATTENTION, **DENSE_MLP}, interleaved_rope=True)
MIXTRAL = GGUFArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    {**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    },
    interleaved_rope=True,
    expert_count="num_local_experts",
)
# Whether the top-k routing weights are normalised is fixed per architecture in llama.cpp and seldom in the file.
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": LLAMA,
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM", {**ATTENTION, **DENSE_MLP}),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", {**ATTENTION, **QK_NORM, **DENSE_MLP}),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**ATTENTION, **MLP_ROUTER, **SHARED_EXPERT},
        experts=MLP_EXPERTS,
        expert_count="num_experts",
        keys={"expert_weights_norm": ("norm_topk_prob", False)},
    ),
    "qwen3moe": GGUFArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**ATTENTION, **QK_NORM, **MLP_ROUTER},
        experts=MLP_EXPERTS,
        expert_count="num_experts",
        keys={"expert_weights_norm": ("norm_topk_prob", True)},
    ),
    "olmoe": GGUFArchitecture(
        "olmoe",
        "OlmoeForCausalLM",
        {**ATTENTION, **QK_NORM, **MLP_ROUTER},
        experts=MLP_EXPERTS,
        expert_count="num_experts",
        keys={
            "expert_weights_norm": ("norm_topk_prob", False),
            "attention.clamp_kqv": ("clip_qkv", None),
        },
    ),
    "granitemoe": GGUFArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        {
            **ATTENTION,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
        },
        joined={"block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps")},
        interleaved_rope=True,
        expert_count="num_local_experts",
        keys={
            "attention.scale": ("attention_multiplier", 1.0),
            "embedding_scale": ("embedding_multiplier", 1.0),
            "residual_scale": ("residual_multiplier", 1.0),
            "logit_scale": ("logits_scaling", 1.0),
        },
    ),
}


def find_architecture(metadata: Mapping[str, Any]) -> GGUFArchitecture:
    """The architecture of a GGUF file; UnknownArchitectureError where it is not supported.

    Mixtral has no name of its own: it is `llama` with experts.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES[name]
