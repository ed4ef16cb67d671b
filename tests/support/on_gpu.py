"""Attention on a GPU: a cache filled by the append kernels, and what the torch reference makes of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey, WideTokens
from subten.kernels.attention.append import _window_moves
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import PrefillRule
from subten.kernels.attention.triton_append import append_chunk, append_decode
from subten.kernels.attention.triton_paged import AttendPrefill
from subten.kernels.attention.triton_prefill import attend_prefill
from subten.kernels.rope import RopeSpec, rope_table
from support.attention import calibrated
from support.kv import gaussian, keys_with_bias

CUDA = torch.device("cuda")


def on_gpu(x: Any) -> Any:
    """A tensor, or all tensors of a dataclass."""
    if isinstance(x, Tensor):
        return x.to(CUDA)
    if is_dataclass(x):
        return replace(x, **{field.name: on_gpu(getattr(x, field.name)) for field in fields(x) if field.init})
    return x


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


@dataclass(frozen=True)
class GpuCache:
    """Sequences of some lengths in shuffled pages; what was never written is NaN."""

    cache: LayerCache
    layer: PagedLayers
    lengths: Sequence[int]
    block_table: Tensor
    window_slot: Tensor
    group: int
    seed: int

    @classmethod
    def of(
        cls,
        name: str,
        head_dim: int,
        kv_heads: int,
        group: int,
        lengths: Sequence[int],
        *,
        mean_key: bool = True,
        room: int = 1,
        rule: PrefillRule = "window",
        seed: int = 0,
    ) -> GpuCache:
        """With `room` for so many tokens more."""
        layout = PageLayout(get_format(name), head_dim, ahead=1)
        calibration = calibrated(layout, kv_heads, seed)
        mean = None
        if mean_key and calibration.mean_key is not None:
            longest = max(lengths) + room + 1
            rope = rope_table(RopeSpec(head_dim, theta=10_000.0), longest, CUDA)
            mean = MeanKey(calibration.mean_key.mean.to(CUDA), rope)
        counts = [max(1, layout.pages_for(length + room)) for length in lengths]
        table = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32, device=CUDA)
        for row, pages in enumerate(torch.randperm(sum(counts), device=CUDA).int().split(counts)):
            table[row, : len(pages)] = pages
        window = (len(lengths), 2, kv_heads, layout.format.window_size, head_dim)
        cache = LayerCache(
            torch.full((sum(counts), kv_heads, layout.record_bytes), 255, dtype=torch.uint8, device=CUDA),
            torch.full(window, torch.nan, dtype=layout.wide_dtype, device=CUDA),
            on_gpu(calibration.coding),
            mean,
            layout,
        )
        slots = torch.arange(len(lengths), device=CUDA).int().flip(0)
        made = cls(cache, PagedLayers.of([cache]), lengths, table, slots, group, seed)
        rows = [row for row, length in enumerate(lengths) if length]
        if rows:
            inputs = made.inputs([0] * len(rows), [lengths[row] for row in rows], rows, rule)
            append_chunk(*made.tokens(sum(lengths), seed), made.layer, inputs)
        return made

    def inputs(
        self, context: Sequence[int], new: Sequence[int], rows: Sequence[int], rule: PrefillRule = "window"
    ) -> AttentionInputs:
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        rows = list(rows)
        return AttentionInputs(int32(starts), int32(context), self.block_table[rows], self.window_slot[rows], rule)

    def tokens(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        heads, head_dim = self.cache.pages.shape[1], self.cache.layout.head_dim
        keys, values = keys_with_bias(count, heads, head_dim, seed), gaussian(count, heads, head_dim, seed=seed + 1)
        return keys.to(CUDA), values.to(CUDA)

    def queries(self, count: int, dtype: torch.dtype) -> Tensor:
        heads = self.cache.pages.shape[1] * self.group
        return gaussian(count, heads, self.cache.layout.head_dim, seed=self.seed + 77).to(CUDA, dtype)

    def decode(
        self, kernel: DecodeKernel, dtype: torch.dtype = torch.float32, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One new token per sequence: twice the kernel's result, and the reference's in float32."""
        batch = len(self.lengths)
        inputs = self.inputs(self.lengths, [1] * batch, range(batch))
        keys, values = self.tokens(batch, self.seed + 5)
        query = append_decode(
            self.queries(batch, dtype),
            keys.to(dtype),
            values.to(dtype),
            self.layer,
            inputs,
            integer=kernel.integer_query,
        )
        scale = self.cache.layout.head_dim**-0.5
        plan, scratch = kernel.prepare(query, self.layer, self.block_table.shape[1])
        scratch.stats.fill_(torch.nan)
        scratch.sums.fill_(torch.nan)
        found = [kernel.attend(query, self.layer, inputs, scale, plan, scratch, **options) for _ in range(2)]
        wide = tuple(self._window(row, length + 1) for row, length in enumerate(self.lengths))
        return found[0], found[1], attend_reference(query.q.float(), wide, self.cache, inputs, scale)

    def _window(self, row: int, length: int) -> WideTokens:
        fmt = self.cache.layout.format
        if not fmt.window_size:
            empty = self.cache.windows.new_zeros(0, self.cache.pages.shape[1], self.cache.layout.head_dim)
            return WideTokens(empty, empty, torch.zeros(0, dtype=torch.int64, device=CUDA))
        moves = _window_moves(length, length + 1, fmt, CUDA)
        keys, values = self.cache.windows[int(self.window_slot[row])][:, :, moves.held_slots].transpose(1, 2)
        return WideTokens(keys, values, moves.positions[:-1])

    def prefill(
        self, new: Sequence[int], rule: PrefillRule, kernel: AttendPrefill = attend_prefill
    ) -> tuple[Tensor, Tensor]:
        """New chunks behind every sequence: the kernel's result, and the reference's."""
        inputs = self.inputs(self.lengths, new, range(len(self.lengths)), rule)
        wide = append_chunk(*self.tokens(sum(new), self.seed + 5), self.layer, inputs)
        q, scale = self.queries(sum(new), torch.float32), self.cache.layout.head_dim**-0.5
        found = kernel(q, wide, self.layer, inputs, scale)
        return found, attend_reference(q, wide.by_sequence, self.cache, inputs, scale)


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the sequence, or query, where it is largest."""
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def overall_error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the whole batch."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
