"""Caches to measure on: as large as a served model's, with codes of random keys and values.

Coding every token of a batch of long contexts would take longer than all measurements. So some thousand tokens are
coded, and every page of every layer is a copy of one of their pages: other addresses, the same statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from subten.bench.shapes import Shape
from subten.formats import PAGE_SIZE, CacheGeometry, KVFormat, PageLayout
from subten.formats.codec import write_tokens
from subten.formats.coding import LayerCoding, LayerMoments, calibrated_coding, pair_energy
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey, WideTokens
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import CodingTables, PagedLayers, tokens_in_pages
from subten.kernels.rope import RopeSpec, RopeTable, rope_table
from subten.kvcache.storage import CacheStorage

_CODED_PAGES = 64
_THETA = 1_000_000.0
_QUERY_DTYPE = torch.float16
"""Rounding a result to bf16 costs 1.6e-3 by itself, which would hide what a kernel adds."""


@dataclass(frozen=True)
class Calibration:
    """How the layers of a cache are coded; all layers alike.

    Attributes:
        coding: beyond the format.
        mean_key: what was taken out of the coded keys, or None.
        rope: rotation of the model, for as many positions as the cache may have.
    """

    coding: LayerCoding
    mean_key: MeanKey | None
    rope: RopeTable


@dataclass(frozen=True)
class BenchCache:
    """A batch of sequences in a cache of several layers, right before a decode step.

    Attributes:
        layers: memory and codings.
        calibration: of each layer.
        inputs: the step: one new token per sequence, at position `context_len`.
    """

    layers: PagedLayers
    calibration: Calibration
    inputs: AttentionInputs

    @property
    def num_layers(self) -> int:
        """Layers of the cache."""
        return self.layers.pages.shape[0]

    def with_mean_key(self, mean_key: MeanKey | None) -> BenchCache:
        """The same bytes, read as if this had been taken out before coding."""
        calibration = replace(self.calibration, mean_key=mean_key)
        tables = _tables(self.layers.layout, calibration, self.num_layers)
        return replace(self, layers=replace(self.layers, tables=tables), calibration=calibration)


@dataclass(frozen=True)
class NewTokens:
    """The new token of each sequence: `q` [batch, num_heads, head_dim], `k` and `v` [batch, kv_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device) -> NewTokens:
        """Gaussian, in fp16."""
        heads = (shape.num_heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (torch.randn(shape.batch, n, shape.head_dim, device=device).to(_QUERY_DTYPE) for n in heads)
        return cls(q, k, v)


def layer_bytes(layout: PageLayout, shape: Shape, context: int) -> int:
    """Bytes that one layer holds for this batch."""
    return layout.cache_bytes(CacheGeometry(1, shape.kv_heads, shape.head_dim), context, shape.batch)


def random_calibration(fmt: KVFormat, shape: Shape, num_positions: int, device: torch.device) -> Calibration:
    """As calibration would find it on random moments: keys whitened, both sides shaped where the format asks for it.

    It has a mean key where the format may take one out.
    """
    heads, head_dim = shape.kv_heads, shape.head_dim
    query, key, output = (_random_moment(heads, head_dim, device) for _ in range(3))
    yes = torch.ones(heads, dtype=torch.bool, device=device)
    moments = LayerMoments(query, key, pair_energy(key), output, shape_keys=yes, whiten_keys=yes)
    rope = _rope(head_dim, num_positions, device)
    mean = torch.randn(heads, head_dim, device=device)
    return Calibration(calibrated_coding(fmt, moments), MeanKey(mean, rope) if fmt.key.remove_mean else None, rope)


@lru_cache
def _rope(head_dim: int, num_positions: int, device: torch.device) -> RopeTable:
    return rope_table(RopeSpec(head_dim, theta=_THETA), num_positions, device)


def _random_moment(heads: int, size: int, device: torch.device) -> Tensor:
    """Symmetric positive definite, eigenvalues over two powers of ten in any directions."""
    directions = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64)).Q
    energy = 10 ** (2 * torch.rand(heads, 1, size, dtype=torch.float64))
    moment: Tensor = (directions * energy) @ directions.transpose(1, 2)
    return moment.float().to(device)


def build_cache(
    layout: PageLayout, kv_heads: int, contexts: Sequence[int], num_layers: int, calibration: Calibration
) -> BenchCache:
    """A cache for sequences whose queries will read so many tokens, the new one included.

    Raises:
        CacheMemoryError: the device has no room for it.
    """
    fmt, device = layout.format, calibration.coding.kept_channels.device
    # Room for what leaves the window next, as a decode step codes it.
    counts = [-(-tokens_in_pages(context, fmt) // PAGE_SIZE) for context in contexts]
    storage = CacheStorage(
        layout, CacheGeometry(num_layers, kv_heads, layout.head_dim), max(1, sum(counts)), len(contexts), device
    )
    fill_storage(storage, coded_pages(layout, kv_heads, calibration.coding))
    pages = storage.pages.unflatten(1, (num_layers, kv_heads, layout.record_bytes))
    layers = PagedLayers(
        pages.transpose(0, 1),
        storage.windows.transpose(0, 1),
        _tables(layout, calibration, num_layers),
        layout,
    )
    return BenchCache(layers, calibration, _inputs(contexts, counts, device))


def fill_storage(storage: CacheStorage, block: Tensor) -> None:
    """Every page of every layer becomes a copy of one in `block` [pages, kv_heads, record_bytes], windows noise."""
    geometry = storage.geometry
    pages = storage.pages.unflatten(1, (geometry.num_layers, geometry.num_kv_heads, storage.layout.record_bytes))
    for start in range(0, len(pages), len(block)):
        part = pages[start : start + len(block)]
        part.copy_(block[: len(part), None])
    storage.windows.normal_()


def _inputs(contexts: Sequence[int], counts: Sequence[int], device: torch.device) -> AttentionInputs:
    """Pages dealt out in random order; a row of the block table is filled up with pages of others."""
    batch = len(contexts)
    pool = torch.randperm(max(1, sum(counts)), dtype=torch.int32)
    table = torch.zeros(batch, max(1, *counts), dtype=torch.int32)
    for row, pages in enumerate(pool[: sum(counts)].split(list(counts))):
        table[row, : len(pages)] = pages
    return AttentionInputs(
        query_start=torch.arange(batch + 1, dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device) - 1,
        block_table=table.to(device),
        window_slot=torch.arange(batch, dtype=torch.int32, device=device),
    )


def coded_pages(layout: PageLayout, kv_heads: int, coding: LayerCoding) -> Tensor:
    """Gaussian keys and values as codes: uint8 [pages, kv_heads, record_bytes], of some thousand tokens."""
    device = coding.kept_channels.device
    records = torch.zeros(_CODED_PAGES, kv_heads, layout.record_bytes, dtype=torch.uint8, device=device)
    keys, values = torch.randn(2, _CODED_PAGES * PAGE_SIZE, kv_heads, layout.head_dim, device=device)
    write_tokens(records, keys, values, 0, coding, layout, torch.arange(_CODED_PAGES, device=device))
    return records


def _tables(layout: PageLayout, calibration: Calibration, num_layers: int) -> CodingTables:
    return CodingTables.of(layout, [calibration.coding] * num_layers, [calibration.mean_key] * num_layers)


def reference(cache: BenchCache, layer: int, tokens: NewTokens, sequence: int, scale: float) -> Tensor:
    """The torch oracle on the same bytes: attention of one sequence's new token, float32 [num_heads, head_dim].

    Where the new token is still in 16 bit it is taken from `tokens`, not from where an append should have left it.
    """
    row = slice(sequence, sequence + 1)
    inputs, layout = cache.inputs, cache.layers.layout
    one = AttentionInputs(
        query_start=inputs.query_start[:2],
        context_len=inputs.context_len[row],
        block_table=inputs.block_table[row],
        window_slot=inputs.window_slot[row],
    )
    windows = cache.layers.windows[layer]
    wide = _wide_tokens(windows[sequence], int(one.context_len), layout.format)
    if len(wide.positions):
        wide.keys[-1], wide.values[-1] = tokens.k[sequence], tokens.v[sequence]
    held = LayerCache(
        cache.layers.pages[layer], windows, cache.calibration.coding, cache.calibration.mean_key, layout
    )
    return attend_reference(tokens.q[row].float(), (wide,), held, one, scale)[0]


def _wide_tokens(windows: Tensor, context_len: int, fmt: KVFormat) -> WideTokens:
    """What a sequence's new token reads in 16 bit, copied from its windows: the new token itself comes last."""
    length = context_len + 1
    sinks = torch.arange(min(length, fmt.sinks), device=windows.device)
    recent = torch.arange(fmt.sinks + fmt.coded_tokens(length), max(length, fmt.sinks), device=windows.device)
    positions = torch.cat([sinks, recent])
    slots = torch.where(positions < fmt.sinks, positions, fmt.sinks + (positions - fmt.sinks) % max(1, fmt.ring_size))
    keys, values = windows[:, :, slots].transpose(1, 2)
    return WideTokens(keys.contiguous(), values.contiguous(), positions)
