"""The part of a configuration that all families share."""

from __future__ import annotations

from collections.abc import Iterable

from subten.errors import CheckpointError, UnknownArchitectureError
from subten.kernels.moe.inputs import RouterSpec
from subten.models.families.config import MOST_PARTS, MOST_POSITIONS, ConfigReader
from subten.models.families.rope import max_positions, rope_spec
from subten.models.spec import AttentionSpec, DecoderSpec, DenseSpec, MoESpec, QKNorm


def decoder_spec(
    config: ConfigReader,
    family: str,
    attention: AttentionSpec,
    feed_forwards: Iterable[DenseSpec | MoESpec],
    *,
    default_norm_eps: float = 1e-6,
    default_theta: float = 10_000.0,
    embedding_multiplier: float = 1.0,
    residual_multiplier: float = 1.0,
    logits_divisor: float = 1.0,
) -> DecoderSpec:
    """Complete a spec with the entries that every configuration has, and refuse what no family supports."""
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnknownArchitectureError(f"activation {activation!r} is not supported, only 'silu' is")
    rope = rope_spec(config, attention.head_dim, default_theta)
    return DecoderSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=max_positions(config, rope),
        norm_eps=config.number("rms_norm_eps", default_norm_eps),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        attention=attention,
        rope=rope,
        feed_forwards=tuple(feed_forwards),
        embedding_multiplier=embedding_multiplier,
        residual_multiplier=residual_multiplier,
        logits_divisor=logits_divisor,
    )


def attention_spec(
    config: ConfigReader,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QKNorm = "none",
    scale: float | None = None,
    clip_qkv: float | None = None,
    default_head_dim: int | None = None,
) -> AttentionSpec:
    """Read the attention geometry; `head_dim` need not be hidden_size / num_attention_heads."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = config.integer("head_dim", default_head_dim or config.integer("hidden_size") // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}, but RoPE rotates channels in pairs")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        clip_qkv=clip_qkv,
    )


def router_spec(config: ConfigReader, *, renormalize: bool) -> RouterSpec:
    """Read the number of experts, and how many of them a token visits.

    Families, and versions of transformers, differ in whether they write `num_experts` or `num_local_experts`.
    """
    key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts = config.integer(key, most=MOST_PARTS)
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"num_experts_per_tok ({top_k}) is more than {key} ({num_experts})")
    return RouterSpec(num_experts=num_experts, top_k=top_k, renormalize=renormalize)


def every_layer(config: ConfigReader, feed_forward: DenseSpec | MoESpec) -> list[DenseSpec | MoESpec]:
    """The same feed-forward in all layers."""
    return [feed_forward] * config.integer("num_hidden_layers", most=MOST_PARTS)


def refuse_sliding_window(config: ConfigReader, *, on: bool) -> None:
    """Refuse attention to a window of recent tokens, unless the window is never shorter than the context.

    `on` says whether the configuration turns the window on; `layer_types`, if given, can turn it off again.
    """
    kinds = config.texts("layer_types")
    if not on or not config.has("sliding_window") or (kinds and set(kinds) == {"full_attention"}):
        return
    window = config.raw("sliding_window")
    context = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    if not isinstance(window, int) or window < context:
        raise UnknownArchitectureError(
            f"sliding-window attention is not supported (window {window}, context {context}); "
            "a window that covers the context is"
        )
