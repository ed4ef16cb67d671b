"""The weights of a decoder as plain tensors, and what each is made of in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.moe.inputs import MoEWeights, SharedExpertWeights
from subten.models.families import FAMILIES
from subten.models.families.family import TensorNames
from subten.models.spec import AttentionSpec, DecoderSpec, DenseSpec, MoESpec


@dataclass(frozen=True)
class AttentionWeights:
    """Projections to and from the heads; the norms are [head_dim] or [heads * head_dim], see `QKNorm`.

    `qkv` has the rows of all queries, then those of keys, then those of values.
    """

    qkv: LinearWeights
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
    """All weights, on one device, and but for those in e4m3 of one dtype; with tied embeddings the weight of `output`
    is `embedding`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: LinearWeights


Role = Literal["plain", "linear", "experts"]
"""What a weight is for, as far as it decides how it is read: matrices of linear layers, experts (shared ones too),
and the rest: norms, biases, routers, embeddings and the output projection, which may be one."""


class Part(NamedTuple):
    """A checkpoint tensor that holds a weight, or some of its rows."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """One weight, and the checkpoint tensors which make it up when they are put one below the other."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    role: Role
    halves: int = 1
    """Of each matrix: blocks of scales begin anew with each."""


class Taken(NamedTuple):
    """A weight, and its scales where it is in e4m3."""

    values: Tensor
    scale: Tensor | None = None


Take = Callable[[Wanted], Taken]
"""Supplies one weight."""


def assemble_weights(spec: DecoderSpec, take: Take) -> ModelWeights:
    """Build the tree of weights that `spec` asks for, each leaf supplied by `take`.

    This is the one place that knows which weights a decoder has. Reading a checkpoint is one use of it; listing
    what a checkpoint must hold, by a `take` that only takes notes, is another.
    """
    names = FAMILIES[spec.family].names
    matrix = spec.vocab_size, spec.hidden_size

    def whole(name: str, shape: tuple[int, ...]) -> Tensor:
        return take(Wanted(shape, (Part(name, shape),), "plain")).values

    embedding = whole(names.embedding, matrix)
    output = embedding if spec.tied_embeddings else whole(names.output, matrix)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_Layer(spec, names, take, index).weights() for index in range(spec.num_layers)),
        final_norm=whole(names.final_norm, (spec.hidden_size,)),
        output=LinearWeights(output),
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
            input_norm=self._plain((self.spec.hidden_size,), self.names.input_norm),
            attention=self._attention(self.spec.attention),
            post_attention_norm=self._plain((self.spec.hidden_size,), self.names.post_attention_norm),
            feed_forward=(
                self._moe(feed_forward) if isinstance(feed_forward, MoESpec) else self._dense(feed_forward)
            ),
        )

    def _attention(self, attention: AttentionSpec) -> AttentionWeights:
        hidden, names = self.spec.hidden_size, self.names
        q_width = attention.num_heads * attention.head_dim
        kv_width = attention.num_kv_heads * attention.head_dim
        norm_widths = {
            "none": (None, None),
            "per_head": (attention.head_dim, attention.head_dim),
            "full_width": (q_width, kv_width),
        }
        q_norm, k_norm = norm_widths[attention.qk_norm]
        projections = {names.q: q_width, names.k: kv_width, names.v: kv_width}
        return AttentionWeights(
            qkv=self._linear(hidden, attention.qkv_bias, projections),
            o=self._linear(q_width, attention.output_bias, {names.o: hidden}),
            q_norm=self._plain((q_norm,), names.q_norm) if q_norm else None,
            k_norm=self._plain((k_norm,), names.k_norm) if k_norm else None,
        )

    def _dense(self, dense: DenseSpec) -> DenseWeights:
        hidden, width, names = self.spec.hidden_size, dense.intermediate_size, self.names
        return DenseWeights(
            gate_up=self._linear(hidden, dense.bias, {names.gate: width, names.up: width}),
            down=self._linear(width, dense.bias, {names.down: hidden}),
        )

    def _moe(self, moe: MoESpec) -> MoEWeights:
        hidden, width, num_experts = self.spec.hidden_size, moe.intermediate_size, moe.router.num_experts
        names = self.names.experts
        gate_up = self._experts((num_experts, 2 * width, hidden), _per_expert(names.gate_up, num_experts), halves=2)
        down = self._experts((num_experts, hidden, width), _per_expert((names.down,), num_experts))
        return MoEWeights(
            rule=moe.router,
            router=self._plain((num_experts, hidden), names.router),
            gate_up=gate_up.values,
            down=down.values,
            shared=self._shared(moe.shared_intermediate_size) if moe.shared_intermediate_size else None,
            gate_up_scale=gate_up.scale,
            down_scale=down.scale,
        )

    def _shared(self, width: int) -> SharedExpertWeights:
        hidden, names = self.spec.hidden_size, self.names.shared_expert
        gate_up = self._experts((2 * width, hidden), names.gate_up, halves=2)
        down = self._experts((hidden, width), (names.down,))
        return SharedExpertWeights(
            gate_up=gate_up.values,
            down=down.values,
            gate=self._plain((1, hidden), names.gate),
            gate_up_scale=gate_up.scale,
            down_scale=down.scale,
        )

    def _linear(self, in_features: int, bias: bool, rows: dict[str, int]) -> LinearWeights:
        """Projections that read the same, one below the other: name -> rows."""
        out_features = sum(rows.values())
        matrices = {f"{name}.weight": (count, in_features) for name, count in rows.items()}
        weight = self._take((out_features, in_features), matrices, "linear")
        biases: dict[str, tuple[int, ...]] = {f"{name}.bias": (count,) for name, count in rows.items()}
        added = self._take((out_features,), biases, "plain").values if bias else None
        return LinearWeights(weight.values, added, weight.scale)

    def _experts(self, shape: tuple[int, ...], names: tuple[str, ...], halves: int = 1) -> Taken:
        """A matrix, or one per expert, of equal parts."""
        part = shape if len(names) == 1 else (prod(shape[:-1]) // len(names), shape[-1])
        return self._take(shape, dict.fromkeys(names, part), "experts", halves)

    def _plain(self, shape: tuple[int, ...], name: str) -> Tensor:
        return self._take(shape, {name: shape}, "plain").values

    def _take(
        self, shape: tuple[int, ...], parts: Mapping[str, tuple[int, ...]], role: Role, halves: int = 1
    ) -> Taken:
        prefix = self.names.layer.format(layer=self.index)
        listed = tuple(Part(prefix + name, size) for name, size in parts.items())
        return self.take(Wanted(shape, listed, role, halves))


def _per_expert(names: tuple[str, ...], num_experts: int) -> tuple[str, ...]:
    """The names of all experts, in the order of the experts; of stacked experts, the names as they are."""
    if "{expert}" not in names[0]:
        return names
    return tuple(name.format(expert=expert) for expert in range(num_experts) for name in names)
