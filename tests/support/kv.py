"""Page layouts, keys and values, codings of a layer, and page records to test with."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from subten.formats import FORMATS, PAGE_SIZE, KVFormat, PageLayout
from subten.formats.codec import decode_keys, decode_values, reconstruct_keys, reconstruct_values, write_tokens
from subten.formats.coding import LayerCoding, LayerMoments, calibrated_coding, pair_energy, uncalibrated_coding

HEAD_DIMS = (64, 80, 96, 128, 256)
FORMAT_NAMES = tuple(FORMATS)
CODED_NAMES = tuple(name for name, fmt in FORMATS.items() if not fmt.lossless)
CALIBRATED_NAMES = tuple(name for name, fmt in FORMATS.items() if fmt.key.rounding == "shaped")
CPU = torch.device("cpu")

POISON = 0xFF
"""Byte of memory that nobody wrote: NaN as bf16, fp16, float32 and e4m3."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def keys_with_bias(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Keys as models have them: channels of different strength, a strong bias in a few, tokens of any norm."""
    noise = torch.randn(tokens, heads, head_dim, generator=generator(seed))
    strength = torch.rand(heads, head_dim, generator=generator(seed + 1)) + 0.5
    bias = torch.randn(heads, head_dim, generator=generator(seed + 2)) * (strength > 1.4) * 8
    norm = torch.rand(tokens, heads, 1, generator=generator(seed + 3)) + 0.5
    return (noise * strength + bias) * norm


def kept_channels(layout: PageLayout, heads: int, seed: int = 0) -> Tensor:
    """Another pair for every head, as calibration would choose them."""
    half, pairs = layout.head_dim // 2, layout.format.key.kept_pairs
    first = torch.stack([torch.randperm(half, generator=generator(seed + h))[:pairs] for h in range(heads)])
    return torch.cat([first, first + half], dim=-1)


def plain_coding(layout: PageLayout, heads: int, seed: int = 0) -> LayerCoding:
    """What the format does by itself: nothing of a model is known but the pairs to keep."""
    return uncalibrated_coding(layout.format, layout.head_dim, kept_channels(layout, heads, seed))


@cache
def random_moment(heads: int, size: int, seed: int = 0, decades: float = 2.0) -> Tensor:
    """Symmetric positive definite [heads, size, size]: eigenvalues over some powers of ten, in any directions."""
    directions = torch.linalg.qr(gaussian(heads, size, size, seed=seed).double()).Q
    energy = 10 ** (decades * torch.rand(heads, 1, size, generator=generator(seed + 1), dtype=torch.float64))
    return ((directions * energy) @ directions.transpose(1, 2)).float()


def random_moments(heads: int, head_dim: int, seed: int = 0) -> LayerMoments:
    """What calibration could have measured; the heads take turns in what was found good for them."""
    head = torch.arange(heads)
    query, key, output = (random_moment(heads, head_dim, seed + part) for part in (0, 10, 20))
    return LayerMoments(query, key, pair_energy(key), output, shape_keys=head % 3 != 2, whiten_keys=head % 2 == 0)


def random_coding(layout: PageLayout, heads: int, seed: int = 0) -> LayerCoding:
    """The format calibrated on moments that have nothing to do with the tokens of the test."""
    return _random_coding(layout.format.with_windows(0, 0), heads, layout.head_dim, seed)


@cache
def _random_coding(fmt: KVFormat, heads: int, head_dim: int, seed: int) -> LayerCoding:
    return calibrated_coding(fmt, random_moments(heads, head_dim, seed))


def poisoned_records(layout: PageLayout, pages: int, heads: int) -> Tensor:
    return torch.full((pages, heads, layout.record_bytes), POISON, dtype=torch.uint8)


def encode(layout: PageLayout, keys: Tensor, values: Tensor, coding: LayerCoding, step: int | None = None) -> Tensor:
    """Records [pages, heads, record_bytes] of tokens that are written `step` at a time, into poisoned memory."""
    pages = -(-keys.shape[0] // PAGE_SIZE)
    records = poisoned_records(layout, pages, keys.shape[1])
    table = torch.arange(pages)
    for first in range(0, keys.shape[0], step or keys.shape[0]):
        part = slice(first, first + (step or keys.shape[0]))
        write_tokens(records, keys[part], values[part], first, coding, layout, table)
    return records


def reconstruct(layout: PageLayout, records: Tensor, coding: LayerCoding, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, heads, head_dim] that attention sees in these records, float32."""
    by_head = records.transpose(0, 1)
    keys = reconstruct_keys(decode_keys(by_head, layout), coding, layout)
    values = reconstruct_values(decode_values(by_head, layout), coding)
    return keys[:, :tokens].transpose(0, 1), values[:, :tokens].transpose(0, 1)


def granular(fmt: KVFormat, tokens: int) -> int:
    """The largest number of tokens up to `tokens` that the format can code."""
    return tokens - tokens % fmt.granularity
