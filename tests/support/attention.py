"""A small runner for the attention references, and attention once more from the definition of who sees what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from subten.engine.moments import MEAN_PAIRS
from subten.formats import PAGE_SIZE, PageLayout
from subten.formats.codec import decode_keys, decode_values, reconstruct_keys, reconstruct_values
from subten.formats.coding import LayerCoding, TensorCoding
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey, PrefillRule, WideTokens
from subten.kernels.attention.append import append_reference
from subten.kernels.attention.attend import attend_reference
from subten.kernels.rope import RopeSpec, RopeTable, rope_table
from support.kv import (
    CALIBRATED_NAMES,
    CPU,
    POISON,
    encode,
    gaussian,
    granular,
    keys_with_bias,
    plain_coding,
    random_coding,
)


@dataclass(frozen=True)
class History:
    """A sequence's queries, keys and values, [tokens, heads, head_dim]; keys and values are exact in bf16."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]

    def part(self, start: int, end: int) -> History:
        return History(self.q[start:end], self.k[start:end], self.v[start:end])

    def cut(self, sizes: Sequence[int]) -> list[History]:
        ends = np.cumsum(sizes).tolist()
        return [self.part(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def to(self, dtype: torch.dtype) -> History:
        return History(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype))


def history(
    length: int, kv_heads: int, group: int, head_dim: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> History:
    q = gaussian(length, kv_heads * group, head_dim, seed=seed)
    k = keys_with_bias(length, kv_heads, head_dim, seed=seed + 1).bfloat16()
    v = gaussian(length, kv_heads, head_dim, seed=seed + 2).bfloat16()
    return History(q, k, v).to(dtype)


@dataclass(frozen=True)
class Calibration:
    """How one layer is coded beyond its format, and what is taken out of its keys first."""

    coding: LayerCoding
    mean_key: MeanKey | None = None

    @property
    def exact(self) -> LayerCoding:
        """The way back from coded space in float64."""
        return replace(self.coding, key=_in_float64(self.coding.key), value=_in_float64(self.coding.value))


def plain(layout: PageLayout, kv_heads: int) -> Calibration:
    return Calibration(plain_coding(layout, kv_heads))


def calibrated(layout: PageLayout, kv_heads: int, seed: int = 0) -> Calibration:
    """Random moments, and where the format takes one out a mean key that RoPE carries along: as calibration leaves
    it, zero but for some rotary pairs, other ones in every head."""
    if not layout.format.key.remove_mean:
        return Calibration(random_coding(layout, kv_heads, seed))
    pairs = layout.head_dim // 2
    live = (torch.arange(pairs) + torch.arange(kv_heads)[:, None]) % max(1, pairs // MEAN_PAIRS) == 0
    mean = 4 * gaussian(kv_heads, layout.head_dim, seed=seed + 30) * live.repeat(1, 2)
    return Calibration(random_coding(layout, kv_heads, seed), MeanKey(mean, _rope(layout.head_dim)))


@cache
def _rope(head_dim: int) -> RopeTable:
    return rope_table(RopeSpec(head_dim, theta=10_000.0), 2048, CPU)


Calibrate = Callable[[PageLayout, int], Calibration]
"""What makes a layer's calibration of a layout and a number of KV heads."""

CALIBRATED = (*CALIBRATED_NAMES, "kv4:kv2", "kv2:kivi2", "kivi2:kv4")
"""Formats to be tested with a calibration as well, both sides or one of them shaped."""


def with_calibrations(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test with these formats as they are, and with those that use one with a calibration."""
    cases = [pytest.param(name, plain, id=name) for name in names]
    cases += [pytest.param(name, calibrated, id=f"{name}-calibrated") for name in names if name in CALIBRATED]
    return pytest.mark.parametrize(("name", "calibrate"), cases)


def _in_float64(coding: TensorCoding | None) -> TensorCoding | None:
    return coding and replace(coding, from_coded=coding.from_coded.double())


@dataclass
class Paged:
    """One layer's cache of a batch of sequences, driven step by step as the engine's runner does.

    Memory starts poisoned. Pages are dealt out in the order of a shuffled pool, and block tables are padded.
    """

    layout: PageLayout
    kv_heads: int
    lengths: Sequence[int]
    rule: PrefillRule = "window"
    seed: int = 0
    poison: int = POISON
    calibrate: Calibrate = plain
    calibration: Calibration = field(init=False)
    cache: LayerCache = field(init=False)
    tables: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    held: list[int] = field(init=False)

    def __post_init__(self) -> None:
        layout, batch = self.layout, len(self.lengths)
        counts = [layout.pages_for(length) for length in self.lengths]
        pool = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(self.seed))
        dealt = list(pool[: sum(counts)].split(counts))
        self.tables = torch.full((batch, max([*counts, 1]) + 1), 2**30, dtype=torch.int32)
        for row, pages in enumerate(dealt):
            self.tables[row, : len(pages)] = pages.int()
        self.slots = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(self.seed))[:batch].int()
        pages = torch.full((len(pool), self.kv_heads, layout.record_bytes), self.poison, dtype=torch.uint8)
        shape = (batch + 1, 2, self.kv_heads, layout.format.window_size, layout.head_dim)
        windows = torch.full((*shape, layout.wide_dtype.itemsize), self.poison, dtype=torch.uint8)
        self.calibration = self.calibrate(layout, self.kv_heads)
        self.cache = LayerCache(
            pages,
            windows.view(layout.wide_dtype)[..., 0],
            self.calibration.coding,
            self.calibration.mean_key,
            layout,
        )
        self.held = [0] * batch

    def inputs(self, sizes: dict[int, int]) -> AttentionInputs:
        """A step that appends so many tokens to each of these sequences."""
        rows = list(sizes)
        return AttentionInputs(
            query_start=torch.tensor([0, *np.cumsum(list(sizes.values())).tolist()], dtype=torch.int32),
            context_len=torch.tensor([self.held[row] for row in rows], dtype=torch.int32),
            block_table=self.tables[rows],
            window_slot=self.slots[rows],
            rule=self.rule,
        )

    def append(self, chunks: dict[int, History]) -> tuple[AttentionInputs, tuple[WideTokens, ...]]:
        """Append each sequence's chunk, all in one batch."""
        sizes = {row: chunk.length for row, chunk in chunks.items()}
        inputs = self.inputs(sizes)
        k, v = (torch.cat([getattr(chunk, name) for chunk in chunks.values()]) for name in ("k", "v"))
        wide = append_reference(k, v, self.cache, inputs)
        for row, size in sizes.items():
            self.held[row] += size
        return inputs, wide

    def step(self, chunks: dict[int, History], scale: float) -> dict[int, Tensor]:
        """Append each sequence's chunk and attend with its queries."""
        inputs, wide = self.append(chunks)
        q = torch.cat([chunk.q for chunk in chunks.values()])
        out = attend_reference(q, wide, self.cache, inputs, scale)
        return dict(zip(chunks, out.split([chunk.length for chunk in chunks.values()]), strict=True))

    def run(self, histories: Sequence[History], chunkings: Sequence[Sequence[int]], scale: float) -> list[Tensor]:
        """Feed every sequence chunk by chunk, all sequences that have chunks left together."""
        cuts = [past.cut(sizes) for past, sizes in zip(histories, chunkings, strict=True)]
        outputs: list[list[Tensor]] = [[] for _ in histories]
        for number in range(max(map(len, chunkings))):
            chunks = {row: parts[number] for row, parts in enumerate(cuts) if number < len(parts)}
            for row, out in self.step(chunks, scale).items():
                outputs[row].append(out)
        return [torch.cat(parts) for parts in outputs]

    def pages_of(self, row: int) -> Tensor:
        """The sequence's written records [pages, kv_heads, record_bytes], in token order."""
        return self.cache.pages[self.tables[row, : self.layout.pages_for(self.held[row])].long()]

    def window_of(self, row: int) -> Tensor:
        return self.cache.windows[int(self.slots[row])]


def reads_codes(query: int, token: int, chunk_start: int, chunk_size: int, layout: PageLayout, rule: str) -> bool:
    """The visibility rule: whether the query at one position reads the token at another through the codes."""
    fmt = layout.format
    if token < fmt.sinks or (rule == "chunk" and chunk_size > 1 and token >= chunk_start):
        return False
    if fmt.granularity == 1:
        return token <= query - fmt.recent
    end_of_its_page = fmt.sinks + (token - fmt.sinks) // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE - 1
    return end_of_its_page <= query - fmt.recent


def through_codes(past: History, layout: PageLayout, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Every key and value as it reads once it is coded, float64; sinks and incomplete pages as they are."""
    first, tokens = layout.format.sinks, granular(layout.format, max(0, past.length - layout.format.sinks))
    keys, values = past.k.double(), past.v.double()
    if tokens:
        part, coding = slice(first, first + tokens), calibration.exact
        mean = removed_mean(calibration, past)[part]
        records = encode(layout, past.k[part].float() - mean, past.v[part].float(), calibration.coding)
        records = records.transpose(0, 1)
        decoded = decode_keys(records, layout)
        decoded = decoded._replace(coded=decoded.coded.double(), kept=decoded.kept.double())
        keys, values = keys.clone(), values.clone()
        keys[part] = reconstruct_keys(decoded, coding, layout)[:, :tokens].transpose(0, 1) + mean
        values[part] = reconstruct_values(decode_values(records, layout).double(), coding)[:, :tokens].transpose(0, 1)
    return keys, values


def removed_mean(calibration: Calibration, past: History) -> Tensor:
    """What is taken out of each key before it is coded, float32 like the keys."""
    if calibration.mean_key is None:
        return torch.zeros_like(past.k, dtype=torch.float32)
    return calibration.mean_key.at(torch.arange(past.length))


def attention_by_definition(
    past: History,
    chunking: Sequence[int],
    layout: PageLayout,
    calibration: Calibration,
    rule: str,
    scale: float,
    first_query: int = 0,
) -> Tensor:
    """float64, one query at a time: softmax over the keys up to the query, each as the rule lets it be seen.

    Returns:
        [length - first_query, num_heads, head_dim].
    """
    coded_keys, coded_values = (x.numpy() for x in through_codes(past, layout, calibration))
    q, wide_keys, wide_values = (x.double().numpy() for x in (past.q, past.k, past.v))
    group = q.shape[1] // wide_keys.shape[1]
    out = np.empty((past.length - first_query, *q.shape[1:]))
    chunk_start = 0
    for size in chunking:
        for i in range(max(first_query, chunk_start), chunk_start + size):
            codes = np.array([reads_codes(i, j, chunk_start, size, layout, rule) for j in range(i + 1)])
            for head in range(wide_keys.shape[1]):
                readers = slice(head * group, (head + 1) * group)
                through = q[i, readers] @ coded_keys[: i + 1, head].T, q[i, readers] @ wide_keys[: i + 1, head].T
                scores = np.where(codes, *through) * scale
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                from_codes = (weights * codes) @ coded_values[: i + 1, head]
                out[i - first_query, readers] = from_codes + (weights * ~codes) @ wide_values[: i + 1, head]
        chunk_start += size
    return torch.from_numpy(out)


def cut(length: int, *sizes: int) -> list[int]:
    """Chunks of these sizes in turn, over and over, until `length` is used up."""
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length - sum(chunks)))
    return chunks
