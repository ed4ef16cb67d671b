"""The weights of a decoder as plain tensors, and what each is made of in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from subten.kernels.moe.inputs import MoEWeights, SharedExpertWeights
from subten.models.families import FAMILIES
from subten.models.families.family import TensorNames
from subten.models.spec import AttentionSpec, DecoderSpec, DenseSpec, MoESpec


@dataclass(frozen=True)
class LinearWeights:
    """`weight` [out, in], `bias` [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class AttentionWeights:
    """Projections to and from the heads; the norms are [head_dim] or [heads * head_dim], see `QKNorm`."""

    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class DenseWeights:
    """`gate_up` [2 * intermediate, hidden]: the gate projection's rows, then the up projection's."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention and feed-forward, each behind its norm."""

    input_norm: Tensor
    attention: AttentionWeights
    post_attention_norm: Tensor
    feed_forward: DenseWeights | MoEWeights


@dataclass(frozen=True)
class ModelWeights:
    """All weights, of one dtype and on one device; with tied embeddings `output` is `embedding`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor


Take = Callable[[tuple[int, ...], tuple[str, ...]], Tensor]
"""``take(shape, parts)`` supplies one weight.

`parts` names the checkpoint tensors that hold it: the weight itself, or several tensors with an equal number of its
rows each, which make up the weight when they are put one below the other.
"""


def assemble_weights(spec: DecoderSpec, take: Take) -> ModelWeights:
    """Build the tree of weights that `spec` asks for, each leaf supplied by `take`.

    This is the one place that knows which weights a decoder has. Reading a checkpoint is one use of it; listing
    what a checkpoint must hold, by a `take` that only takes notes, is another.
    """
    names = FAMILIES[spec.family].names
    embedding = take((spec.vocab_size, spec.hidden_size), (names.embedding,))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_Layer(spec, names, take, index).weights() for index in range(spec.num_layers)),
        final_norm=take((spec.hidden_size,), (names.final_norm,)),
        output=embedding if spec.tied_embeddings else take(tuple(embedding.shape), (names.output,)),
    )


@dataclass(frozen=True)
class _Layer:
    """Assembles layer `index`."""

    spec: DecoderSpec
    names: TensorNames
    take: Take
    index: int

    def weights(self) -> LayerWeights:
        feed_forward = self.spec.feed_forwards[self.index]
        return LayerWeights(
            input_norm=self._take((self.spec.hidden_size,), self.names.input_norm),
            attention=self._attention(self.spec.attention),
            post_attention_norm=self._take((self.spec.hidden_size,), self.names.post_attention_norm),
            feed_forward=(
                self._moe(feed_forward) if isinstance(feed_forward, MoESpec) else self._dense(feed_forward)
            ),
        )

    def _attention(self, attention: AttentionSpec) -> AttentionWeights:
        hidden = self.spec.hidden_size
        q_width = attention.num_heads * attention.head_dim
        kv_width = attention.num_kv_heads * attention.head_dim
        norm_widths = {
            "none": (None, None),
            "per_head": (attention.head_dim, attention.head_dim),
            "full_width": (q_width, kv_width),
        }
        q_norm, k_norm = norm_widths[attention.qk_norm]
        return AttentionWeights(
            q=self._linear(q_width, hidden, attention.qkv_bias, self.names.q),
            k=self._linear(kv_width, hidden, attention.qkv_bias, self.names.k),
            v=self._linear(kv_width, hidden, attention.qkv_bias, self.names.v),
            o=self._linear(hidden, q_width, attention.output_bias, self.names.o),
            q_norm=self._take((q_norm,), self.names.q_norm) if q_norm else None,
            k_norm=self._take((k_norm,), self.names.k_norm) if k_norm else None,
        )

    def _dense(self, dense: DenseSpec) -> DenseWeights:
        hidden, width = self.spec.hidden_size, dense.intermediate_size
        return DenseWeights(
            gate_up=self._linear(2 * width, hidden, dense.bias, self.names.gate, self.names.up),
            down=self._linear(hidden, width, dense.bias, self.names.down),
        )

    def _moe(self, moe: MoESpec) -> MoEWeights:
        hidden, width, num_experts = self.spec.hidden_size, moe.intermediate_size, moe.router.num_experts
        names = self.names.experts
        return MoEWeights(
            rule=moe.router,
            router=self._take((num_experts, hidden), names.router),
            gate_up=self._take((num_experts, 2 * width, hidden), *_per_expert(names.gate_up, num_experts)),
            down=self._take((num_experts, hidden, width), *_per_expert((names.down,), num_experts)),
            shared=self._shared(moe.shared_intermediate_size) if moe.shared_intermediate_size else None,
        )

    def _shared(self, width: int) -> SharedExpertWeights:
        hidden, names = self.spec.hidden_size, self.names.shared_expert
        return SharedExpertWeights(
            gate_up=self._take((2 * width, hidden), *names.gate_up),
            down=self._take((hidden, width), names.down),
            gate=self._take((1, hidden), names.gate),
        )

    def _linear(self, out_features: int, in_features: int, bias: bool, *names: str) -> LinearWeights:
        return LinearWeights(
            weight=self._take((out_features, in_features), *(f"{name}.weight" for name in names)),
            bias=self._take((out_features,), *(f"{name}.bias" for name in names)) if bias else None,
        )

    def _take(self, shape: tuple[int, ...], *names: str) -> Tensor:
        prefix = self.names.layer.format(layer=self.index)
        return self.take(shape, tuple(prefix + name for name in names))


def _per_expert(names: tuple[str, ...], num_experts: int) -> tuple[str, ...]:
    """The names of all experts, in the order of the experts; of stacked experts, the names as they are."""
    if "{expert}" not in names[0]:
        return names
    return tuple(name.format(expert=expert) for expert in range(num_experts) for name in names)
