"""The decoder: token ids in, hidden states and logits out. One class for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.attention.inputs import AttentionInputs, Heads, QKNorm
from subten.kernels.attention.paged import PagedAttention
from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.rope import rope_table
from subten.kernels.select import Kernels
from subten.models.spec import DecoderSpec
from subten.models.weight_tree import DenseWeights, LayerWeights, ModelWeights

Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""``observe(layer, q, k, v)`` sees what attention without a cache is given; calibration uses it."""

_Attend = Callable[[int, Heads, AttentionInputs], Tensor]


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
        self._routers = [_router(layer.feed_forward) for layer in weights.layers]

    def forward(
        self, inputs: StepInputs, attention: PagedAttention | None, observe: Observer | None = None
    ) -> Tensor:
        """Run one step; returns what the last layer leaves, [tokens, hidden], in the embedding's dtype.

        With attention over a cache, the step's keys and values are appended to it and the history is read from it;
        whoever runs the step calls `finish` when nothing more of it is to come. Without, every sequence is complete
        in this step.
        """
        attend = partial(self._attend_dense, observe) if attention is None else partial(self._attend_paged, attention)
        return self._layers(self.embed(inputs), inputs, attend, range(self.spec.num_layers))

    def embed(self, inputs: StepInputs) -> Tensor:
        """What the first layer is given, [tokens, hidden]."""
        embedded, multiplier = F.embedding(inputs.token_ids, self.weights.embedding), self.spec.embedding_multiplier
        return embedded if multiplier == 1 else embedded * multiplier

    def layers(self, hidden: Tensor, inputs: StepInputs, attention: PagedAttention, indices: range) -> Tensor:
        """Some layers of a step, for one that is taken a few layers at a time: `embed`, then every layer in order are
        `forward`. Other steps may run in between, of other sequences.

        Args:
            hidden: what the layer before left, [tokens, hidden].
            inputs: of the step.
            attention: over the cache.
            indices: of the layers.
        """
        return self._layers(hidden, inputs, partial(self._attend_paged, attention), indices)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, float32 [n, vocab], from what the last layer left, [n, hidden]."""
        norm = self._norm_weights(self.weights.final_norm)
        scores = self.kernels.linear(hidden, self.weights.output, norm=norm, dtype=torch.float32)
        return scores / self.spec.logits_divisor if self.spec.logits_divisor != 1 else scores

    def _layers(self, hidden: Tensor, inputs: StepInputs, attend: _Attend, indices: range) -> Tensor:
        for index in indices:
            layer = self.weights.layers[index]
            attended = attend(index, self._project(hidden, layer, inputs.positions), inputs.attention)
            hidden = self._back(attended.flatten(1), layer.attention.o, hidden)
            hidden = self._feed_forward(hidden, layer, self._routers[index])
        return hidden

    def _project(self, hidden: Tensor, layer: LayerWeights, positions: Tensor) -> Heads:
        """The norm of queries and keys is left to attention where nothing comes between it and RoPE."""
        spec, weights = self.spec.attention, layer.attention
        head_dim, limit = spec.head_dim, spec.clip_qkv
        together = self.kernels.linear(hidden, weights.qkv, norm=self._norm_weights(layer.input_norm))
        q, k, v = together.split([heads * head_dim for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)], dim=1)
        norm: QKNorm | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norm = QKNorm(weights.q_norm, weights.k_norm, self.spec.norm_eps)
            if limit is not None or not len(norm.q_weight) == len(norm.k_weight) == head_dim:
                q, k = self._norm_groups(q, k, norm)
                norm = None
        if limit is not None:
            q, k, v = (tensor.clamp(-limit, limit) for tensor in (q, k, v))
        q, k, v = (tensor.unflatten(1, (-1, head_dim)) for tensor in (q, k, v))
        return Heads(q, k, v, positions, norm, self.rope)

    def _attend_paged(self, attention: PagedAttention, layer: int, heads: Heads, inputs: AttentionInputs) -> Tensor:
        return attention.attend(layer, heads, inputs, self.spec.attention.scale)

    def _attend_dense(self, observe: Observer | None, layer: int, heads: Heads, inputs: AttentionInputs) -> Tensor:
        q, k = heads.q, heads.k
        if heads.norm is not None:
            q, k = self._norm_groups(q, k, heads.norm)
        q, k = self.kernels.rope(q, k, *self.rope.at(heads.positions))
        if observe is not None:
            observe(layer, q, k, heads.v)
        return self.kernels.dense_attention(q, k, heads.v, inputs.query_start, self.spec.attention.scale)

    def _feed_forward(self, hidden: Tensor, layer: LayerWeights, router: LinearWeights | None) -> Tensor:
        weights, norm = layer.feed_forward, self._norm_weights(layer.post_attention_norm)
        if isinstance(weights, MoEWeights):
            assert router is not None, "experts have a router"
            normed, dtype = torch.empty_like(hidden), torch.promote_types(hidden.dtype, torch.float32)
            logits = self.kernels.linear(hidden, router, norm=norm, normed=normed, dtype=dtype)
            factor = self.spec.residual_multiplier
            return self.kernels.moe(normed, weights, logits=logits, residual=hidden, factor=factor)
        gate, up = self.kernels.linear(hidden, weights.gate_up, norm=norm).chunk(2, dim=-1)
        return self._back(F.silu(gate) * up, weights.down, hidden)

    def _back(self, x: Tensor, weights: LinearWeights, hidden: Tensor) -> Tensor:
        """Into the residual stream."""
        return self.kernels.linear(x, weights, residual=hidden, factor=self.spec.residual_multiplier)

    def _norm_weights(self, weight: Tensor) -> NormWeights:
        return NormWeights(weight, self.spec.norm_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def _norm_groups(self, q: Tensor, k: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor]:
        """Normalise groups of as many channels as the weights have: heads, or all heads as one group."""
        q, k = (
            self._norm(x.reshape(len(x), -1, len(weight)), weight).view(x.shape)
            for x, weight in ((q, norm.q_weight), (k, norm.k_weight))
        )
        return q, k


def _router(weights: DenseWeights | MoEWeights) -> LinearWeights | None:
    """Of a block of experts; the gate of the shared expert, where it has one, is one more row."""
    if not isinstance(weights, MoEWeights):
        return None
    if weights.shared is None or weights.shared.gate is None:
        return LinearWeights(weights.router)
    return LinearWeights(torch.cat([weights.router, weights.shared.gate]))
