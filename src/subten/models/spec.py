"""The architecture of a decoder, as data: everything about a model except its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subten.kernels.moe.inputs import RouterSpec
from subten.kernels.rope import RopeSpec

QKNorm = Literal["none", "per_head", "full_width"]
"""RMS norm of queries and keys before RoPE: none, of every head alone, or of all heads as one row."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped KV heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of q . k."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = "none"
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to +-clip_qkv after the norm, before RoPE."""


@dataclass(frozen=True)
class DenseSpec:
    """A SwiGLU feed-forward."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A mixture of SwiGLU experts."""

    router: RouterSpec
    intermediate_size: int
    shared_intermediate_size: int | None = None
    """Width of the expert that every token visits, if there is one."""


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder; each layer is attention, then a dense or a mixture-of-experts feed-forward."""

    family: str
    """Key in `subten.models.families.FAMILIES`, which knows the checkpoint's tensor names."""
    vocab_size: int
    hidden_size: int
    max_positions: int
    """Longest context the model's position embedding is made for, in tokens."""
    norm_eps: float
    tied_embeddings: bool
    """The output projection is the embedding matrix."""
    attention: AttentionSpec
    rope: RopeSpec
    feed_forwards: tuple[DenseSpec | MoESpec, ...]
    """One per layer."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what attention and feed-forward add to the residual stream."""
    logits_divisor: float = 1.0

    @property
    def num_layers(self) -> int:
        """Layers of attention and feed-forward."""
        return len(self.feed_forwards)

    @property
    def expert_sizes(self) -> tuple[tuple[int, int], ...]:
        """Hidden and intermediate size of all kinds of experts, shared ones among them."""
        blocks = [block for block in self.feed_forwards if isinstance(block, MoESpec)]
        widths = {block.intermediate_size for block in blocks}
        widths |= {block.shared_intermediate_size for block in blocks if block.shared_intermediate_size}
        return tuple((self.hidden_size, width) for width in sorted(widths))
