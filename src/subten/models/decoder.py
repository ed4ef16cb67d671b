"""The decoder: token ids in, hidden states and logits out. One class for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.kernels.attention.inputs import AttentionInputs, LayerCache
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.rope import rope_table
from subten.kernels.select import Kernels
from subten.models.spec import DecoderSpec
from subten.models.weight_tree import AttentionWeights, DenseWeights, LinearWeights, ModelWeights

Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""``observe(layer, q, k, v)`` sees what attention is given; calibration uses it."""


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
        self, inputs: StepInputs, cache: Sequence[LayerCache] | None, observe: Observer | None = None
    ) -> Tensor:
        """Run one step; returns the hidden states after the final norm, [tokens, hidden], in the weights' dtype.

        With a cache (one entry per layer), the step's keys and values are appended to it and attention reads the
        history from it. Without, every sequence is complete in this step.
        """
        hidden = F.embedding(inputs.token_ids, self.weights.embedding) * self.spec.embedding_multiplier
        cos_sin = self.rope.at(inputs.positions)
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._project(self._norm(hidden, layer.input_norm), layer.attention, cos_sin)
            if observe is not None:
                observe(index, q, k, v)
            attended = self._attend(q, k, v, inputs.attention, None if cache is None else cache[index])
            hidden = self._add(hidden, self._linear(attended.flatten(1), layer.attention.o))
            normed = self._norm(hidden, layer.post_attention_norm)
            hidden = self._add(hidden, self._feed_forward(normed, layer.feed_forward))
        return self._norm(hidden, self.weights.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, float32 [n, vocab], from hidden states [n, hidden]."""
        return self.kernels.linear(hidden, self.weights.output, None).float() / self.spec.logits_divisor

    def _project(
        self, x: Tensor, weights: AttentionWeights, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, num_heads, head_dim], keys and values [tokens, num_kv_heads, head_dim]."""
        q, k, v = self._linear(x, weights.q), self._linear(x, weights.k), self._linear(x, weights.v)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self._norm_groups(q, weights.q_norm), self._norm_groups(k, weights.k_norm)
        if self.spec.attention.clip_qkv is not None:
            limit = self.spec.attention.clip_qkv
            q, k, v = (tensor.clamp(-limit, limit) for tensor in (q, k, v))
        q, k, v = (tensor.view(len(x), -1, self.spec.attention.head_dim) for tensor in (q, k, v))
        q, k = self.kernels.rope(q, k, *cos_sin)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, cache: LayerCache | None) -> Tensor:
        scale = self.spec.attention.scale
        if cache is None:
            return self.kernels.dense_attention(q, k, v, inputs.query_start, scale)
        wide = self.kernels.kv_append(k, v, cache, inputs)
        return self.kernels.kv_attention(q, wide, cache, inputs, scale)

    def _feed_forward(self, x: Tensor, weights: DenseWeights | MoEWeights) -> Tensor:
        if isinstance(weights, MoEWeights):
            return self.kernels.moe(x, weights)
        gate, up = self._linear(x, weights.gate_up).chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, weights.down)

    def _linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        return self.kernels.linear(x, weights.weight, weights.bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def _norm_groups(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise groups of as many channels as the weight has: heads, or all heads as one group."""
        return self._norm(x.view(len(x), -1, len(weight)), weight).view_as(x)

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, x, alpha=self.spec.residual_multiplier)
