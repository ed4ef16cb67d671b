"""The decoder: token ids in, hidden states and logits out. One class for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.attention.inputs import AttentionInputs, QKNorm
from subten.kernels.attention.paged import PagedAttention
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.rope import rope_table
from subten.kernels.select import Kernels
from subten.models.spec import DecoderSpec
from subten.models.weight_tree import AttentionWeights, DenseWeights, LinearWeights, ModelWeights

Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""``observe(layer, q, k, v)`` sees what attention without a cache is given; calibration uses it."""


@dataclass(frozen=True)
class StepInputs:
    """One step of a ragged batch; the tokens of all sequences are concatenated on one axis.

    `token_ids` and `positions` are int64 [tokens]; `attention` says where each sequence begins, and where its
    cache is.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs


class Decoder:
    """A pre-norm transformer decoder. It holds no state between calls: the cache is an argument."""

    def __init__(self, spec: DecoderSpec, weights: ModelWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self.rope = rope_table(spec.rope, spec.max_positions, weights.embedding.device)

    def forward(
        self, inputs: StepInputs, attention: PagedAttention | None, observe: Observer | None = None
    ) -> Tensor:
        """Run one step; returns the hidden states after the final norm, [tokens, hidden], in the weights' dtype.

        With attention over a cache, the step's keys and values are appended to it and the history is read from it;
        whoever runs the step calls `finish` when nothing more of it is to come. Without, every sequence is complete
        in this step.
        """
        attend = partial(self._attend_dense, observe) if attention is None else partial(self._attend_paged, attention)
        hidden = self._layers(self.embed(inputs), inputs, attend, range(self.spec.num_layers))
        return self.final_norm(hidden)

    def embed(self, inputs: StepInputs) -> Tensor:
        """What the first layer is given, [tokens, hidden]."""
        return F.embedding(inputs.token_ids, self.weights.embedding) * self.spec.embedding_multiplier

    def layers(self, hidden: Tensor, inputs: StepInputs, attention: PagedAttention, indices: range) -> Tensor:
        """Some layers of a step, for one that is taken a few layers at a time: `embed`, then every layer in order,
        then `final_norm` are `forward`. Other steps may run in between, of other sequences.

        Args:
            hidden: what the layer before left, [tokens, hidden].
            inputs: of the step.
            attention: over the cache.
            indices: of the layers.
        """
        return self._layers(hidden, inputs, partial(self._attend_paged, attention), indices)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What `logits` takes, from what the last layer left."""
        return self._norm(hidden, self.weights.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, float32 [n, vocab], from hidden states [n, hidden]."""
        return self.kernels.linear(hidden, self.weights.output, None).float() / self.spec.logits_divisor

    def _layers(self, hidden: Tensor, inputs: StepInputs, attend: Callable[..., Tensor], indices: range) -> Tensor:
        for index in indices:
            layer = self.weights.layers[index]
            q, k, v, norm = self._project(self._norm(hidden, layer.input_norm), layer.attention)
            attended = attend(index, q, k, v, norm, inputs)
            hidden = self._add(hidden, self._linear(attended.flatten(1), layer.attention.o))
            normed = self._norm(hidden, layer.post_attention_norm)
            hidden = self._add(hidden, self._feed_forward(normed, layer.feed_forward))
        return hidden

    def _project(self, x: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor, Tensor, QKNorm | None]:
        """Queries [tokens, num_heads, head_dim], keys and values [tokens, num_kv_heads, head_dim]; and the norm of
        queries and keys, where that is left to attention: it can be where nothing comes between it and RoPE."""
        q, k, v = self._linear(x, weights.q), self._linear(x, weights.k), self._linear(x, weights.v)
        head_dim, limit = self.spec.attention.head_dim, self.spec.attention.clip_qkv
        norm: QKNorm | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norm = QKNorm(weights.q_norm, weights.k_norm, self.spec.norm_eps)
            if limit is not None or not len(norm.q_weight) == len(norm.k_weight) == head_dim:
                q, k = self._norm_groups(q, k, norm)
                norm = None
        if limit is not None:
            q, k, v = (tensor.clamp(-limit, limit) for tensor in (q, k, v))
        q, k, v = (tensor.view(len(x), -1, head_dim) for tensor in (q, k, v))
        return q, k, v, norm

    def _attend_paged(
        self,
        attention: PagedAttention,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QKNorm | None,
        inputs: StepInputs,
    ) -> Tensor:
        return attention.attend(
            layer,
            q,
            k,
            v,
            inputs.attention,
            positions=inputs.positions,
            scale=self.spec.attention.scale,
            norm=norm,
            rope=self.rope,
        )

    def _attend_dense(
        self,
        observe: Observer | None,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QKNorm | None,
        inputs: StepInputs,
    ) -> Tensor:
        if norm is not None:
            q, k = self._norm_groups(q, k, norm)
        q, k = self.kernels.rope(q, k, *self.rope.at(inputs.positions))
        if observe is not None:
            observe(layer, q, k, v)
        return self.kernels.dense_attention(q, k, v, inputs.attention.query_start, self.spec.attention.scale)

    def _feed_forward(self, x: Tensor, weights: DenseWeights | MoEWeights) -> Tensor:
        if isinstance(weights, MoEWeights):
            return self.kernels.moe(x, weights)
        gate, up = self._linear(x, weights.gate_up).chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, weights.down)

    def _linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        return self.kernels.linear(x, weights.weight, weights.bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def _norm_groups(self, q: Tensor, k: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor]:
        """Normalise groups of as many channels as the weights have: heads, or all heads as one group."""
        q, k = (
            self._norm(x.view(len(x), -1, len(weight)), weight).view_as(x)
            for x, weight in ((q, norm.q_weight), (k, norm.k_weight))
        )
        return q, k

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, x, alpha=self.spec.residual_multiplier)
