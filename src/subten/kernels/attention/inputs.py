"""What the attention operations take: plain tensors and a `PageLayout`, never a cache object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from subten.formats.coding import LayerCoding
from subten.formats.layout import PageLayout
from subten.formats.spec import KVFormat
from subten.kernels.rope import RopeTable, rope_reference

PrefillRule = Literal["window", "chunk"]


@dataclass(frozen=True)
class MeanKey:
    """The mean key of each head before RoPE, float32 [num_kv_heads, head_dim], and the model's rotation."""

    mean: Tensor
    rope: RopeTable

    def at(self, positions: Tensor) -> Tensor:
        """The mean key as it lies at int64 `positions` [tokens]: float32 [tokens, num_kv_heads, head_dim]."""
        keys = self.mean.expand(len(positions), -1, -1)
        return rope_reference(keys, keys, *self.rope.at(positions))[1]


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        pages: uint8 [num_pages, num_kv_heads, record_bytes]; the last axis is contiguous, the first is not.
        windows: [num_slots, 2, num_kv_heads, window_size, head_dim] of `layout.wide_dtype`; axis 1 is K, V.
            Sinks come first; position p behind them lies at `sinks + (p - sinks) % ring_size`.
        coding: how the layer is coded, beyond its format.
        mean_key: what was taken out of every coded key and must be added to its scores; None where nothing was.
        layout: format, plane order and offsets of a record.
    """

    pages: Tensor
    windows: Tensor
    coding: LayerCoding
    mean_key: MeanKey | None
    layout: PageLayout


@dataclass(frozen=True)
class QKNorm:
    """Root-mean-square norm of each head of q and k; weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of a step's tokens in one layer, and what is still to be done to them.

    Attributes:
        q: [tokens, num_heads, head_dim]; head h reads KV head h // (num_heads / num_kv_heads).
        k: [tokens, num_kv_heads, head_dim].
        v: the same shape.
        positions: int64 [tokens], of each token in its sequence.
        norm: of q and k; None where it is done.
        rope: to rotate q and k, after the norm; None where that is done.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    norm: QKNorm | None
    rope: RopeTable | None

    def of(self, rows: Tensor) -> Heads:
        """Those of some tokens, by int64 indices."""
        return replace(self, q=self.q[rows], k=self.k[rows], v=self.v[rows], positions=self.positions[rows])


@dataclass(frozen=True)
class AttentionInputs:
    """One ragged batch of a step; the tokens of all sequences are concatenated.

    Attributes:
        query_start: int32 [batch + 1], offsets of the sequences on the token axis.
        context_len: int32 [batch], tokens that were in the cache before this step.
        block_table: int32 [batch, max_pages], pages in token order, already holding room for this step.
        window_slot: int32 [batch], slot of each sequence in `LayerCache.windows`. With a negative one it is nobody's,
            and fills up a batch of single tokens: nothing is read or written for it, and its output is zero.
        rule: what a prefill sees of its own chunk. `window`: by position alone, as in decoding. `chunk`: the
            chunk's own tokens in 16 bit.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    window_slot: Tensor
    rule: PrefillRule = "window"

    @cached_property
    def sequences(self) -> tuple[SequenceStep, ...]:
        """The batch as host-side numbers, one entry per sequence; computed once per step, not per layer."""
        starts = self.query_start.tolist()
        pages = self.block_table.long()
        return tuple(
            SequenceStep(start, end, context, slot, pages[row])
            for row, ((start, end), context, slot) in enumerate(
                zip(pairwise(starts), self.context_len.tolist(), self.window_slot.tolist(), strict=True)
            )
        )

    @cached_property
    def kept(self) -> dict[object, Any]:
        """What kernels have worked out of the batch once per step, not per layer, each by a key of its own."""
        return {}

    @cached_property
    def parts(self) -> tuple[BatchPart, BatchPart]:
        """The sequences with one new token, and those with more; computed once per step, not per layer."""
        lone = [step.end - step.start == 1 for step in self.sequences]
        return self._part(lone), self._part([not one for one in lone])

    def _part(self, members: list[bool]) -> BatchPart:
        device = self.query_start.device
        steps = [step for step, member in zip(self.sequences, members, strict=True) if member]
        starts = [0, *accumulate(step.end - step.start for step in steps)]
        rows = torch.tensor([row for step in steps for row in range(step.start, step.end)], device=device)
        member = torch.tensor(members, device=device)
        return BatchPart(
            rows.long(),
            AttentionInputs(
                torch.tensor(starts, dtype=torch.int32, device=device),
                self.context_len[member],
                self.block_table[member],
                self.window_slot[member],
                self.rule,
            ),
        )


class BatchPart(NamedTuple):
    """Some sequences of a batch: their rows on the batch's token axis (int64), and they as a batch of their own."""

    rows: Tensor
    inputs: AttentionInputs


class SequenceStep(NamedTuple):
    """One sequence's part of a step: its rows on the token axis, and where its cache is."""

    start: int
    end: int
    context_len: int
    window_slot: int
    pages: Tensor

    @property
    def length(self) -> int:
        """Tokens in the cache once this step's tokens are appended."""
        return self.context_len + self.end - self.start

    @property
    def absent(self) -> bool:
        """Whether it is nobody's."""
        return self.window_slot < 0


def coded_until(position: int, context_len: int, length: int, fmt: KVFormat, rule: PrefillRule) -> int:
    """End of the positions that a query reads through the codes; they start behind the sinks.

    Args:
        position: the query's.
        context_len: tokens in the cache before the query's step.
        length: tokens in the cache after it.
        fmt: the format.
        rule: what a prefill (a step of several tokens) sees of its own chunk.
    """
    end = fmt.sinks + fmt.coded_tokens(position + 1)
    return min(end, max(context_len, fmt.sinks)) if rule == "chunk" and length > context_len + 1 else end


class WideTokens(NamedTuple):
    """What one sequence's queries may read unquantised in this step: old windows, then the new tokens.

    `keys` and `values` are [tokens, num_kv_heads, head_dim] of the cache's wide dtype, `positions` int64 [tokens].
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
