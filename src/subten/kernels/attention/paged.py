"""Attention of all layers over one cache, as a decoder uses it; and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from subten.kernels.attention.append import append_reference
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.inputs import AttentionInputs, Heads, LayerCache, QKNorm
from subten.kernels.norm import rms_norm_reference
from subten.kernels.rope import RopeTable, rope_reference


class PagedAttention(Protocol):
    """Attention of all layers over one cache. Built once, when the cache's memory is allocated."""

    def attend(self, layer: int, heads: Heads, inputs: AttentionInputs, scale: float) -> Tensor:
        """Append a step's keys and values to one layer's cache, and attend with its queries.

        Args:
            layer: index of the layer.
            heads: of the step's tokens.
            inputs: the batch.
            scale: factor of q . k.

        Returns:
            [tokens, num_heads, head_dim] in q's dtype.
        """

    def finish(self, inputs: AttentionInputs) -> None:
        """What is left to do for a step, once, after its last layer."""


class TorchPagedAttention:
    """The references, layer by layer."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._caches = tuple(caches)

    def attend(self, layer: int, heads: Heads, inputs: AttentionInputs, scale: float) -> Tensor:
        """See `PagedAttention.attend`."""
        q, k = norm_and_rotate(heads.q, heads.k, heads.positions, heads.norm, heads.rope)
        wide = append_reference(k, heads.v, self._caches[layer], inputs)
        return attend_reference(q, wide, self._caches[layer], inputs, scale)

    def finish(self, inputs: AttentionInputs) -> None:
        """Nothing: `attend` has coded what left the window."""


def norm_and_rotate(
    q: Tensor, k: Tensor, positions: Tensor, norm: QKNorm | None, rope: RopeTable | None
) -> tuple[Tensor, Tensor]:
    """q and k after the norm and the rotation that are still to be done; see `Heads`."""
    if norm is not None:
        q, k = rms_norm_reference(q, norm.q_weight, norm.eps), rms_norm_reference(k, norm.k_weight, norm.eps)
    return (q, k) if rope is None else rope_reference(q, k, *rope.at(positions))
