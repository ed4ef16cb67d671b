"""What a decode kernel is told beyond its tensors: the shape it is compiled for, and how a launch is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subten.formats.layout import PageLayout
from subten.formats.packing import WORD_BITS
from subten.formats.spec import PAGE_SIZE

WINDOW_SPLIT = 128
"""Window tokens of one program. In 16 bit they are as many bytes as 14 pages of `kv2`: about the work of a split of
pages, and the programs of the windows are the first to start."""

FEW_SPLITS = 32
"""Partial results of a sequence and head that one program adds up in little time beside what it takes to get them."""

_REGISTERS_PER_SM = 65536
_WAVES = 4
"""Where sequences and heads alone nearly fill the GPU, splits are cut so that this many waves of programs follow
each other: the last, ragged one then costs at most a quarter more than an even end."""
_TILES_PER_WARP = 2
"""At least, so that the loads of one tile overlap the arithmetic of another."""

Grid = Literal["packed", "fp16", "scale"]


@dataclass(frozen=True)
class RecordSide:
    """How the keys, or the values, of a page record are coded and where they lie; offsets count int16 words.

    Attributes:
        bits: of one code, or of one element where nothing is coded.
        grid: what is stored per token beside the codes: scale and offset in one word, two fp16 numbers, a scale; None
            where nothing is coded.
        planes: codes of a word.
        words: per token.
        padded_words: words of a token as a tensor core takes them.
        codes: offset of the words.
        scales: offset of what is stored per token.
    """

    bits: int
    grid: Grid | None
    planes: int
    words: int
    padded_words: int
    codes: int
    scales: int

    @classmethod
    def of(cls, layout: PageLayout, name: Literal["key", "value"]) -> RecordSide:
        """Of a layout that `device_cache.refusal` has no objection to."""
        fmt = layout.format.key if name == "key" else layout.format.value
        grid: Grid | None = None
        if fmt.coded:
            grid = fmt.affine if fmt.offset else "scale"
        planes = WORD_BITS // fmt.bits
        words = layout.head_dim // planes
        return cls(
            bits=fmt.bits,
            grid=grid,
            planes=planes,
            words=words,
            padded_words=max(16, _power_of_two(words)),
            codes=layout.planes[f"{name}_codes"].offset // 2,
            scales=layout.planes[f"{name}_scale"].offset // 2 if fmt.coded else 0,
        )


@dataclass(frozen=True)
class DecodeShape:
    """What of a layer a decode kernel is compiled for: format and shape, nothing of a batch.

    Attributes:
        head_dim: channels of a head, a multiple of 16.
        channels: head_dim, padded to a power of two of at least 32.
        group: query heads of one KV head.
        heads: the group, padded to columns of a tensor core's tile.
        sinks: tokens at the start that stay in 16 bit.
        ring: tokens at the end that do.
        window_splits: programs that share the 16-bit tokens of one sequence and KV head.
        keys: of a record.
        values: of a record.
        num_kept: key channels in 16 bit beside the codes.
        kept: offset of these, in int16 words.
        sliding_window: tokens that a query sees, itself included; None means all.
    """

    head_dim: int
    channels: int
    group: int
    heads: int
    sinks: int
    ring: int
    window_splits: int
    keys: RecordSide
    values: RecordSide
    num_kept: int
    kept: int
    sliding_window: int | None

    @classmethod
    def of(cls, layout: PageLayout, group: int, sliding_window: int | None = None) -> DecodeShape:
        """Of a layer with pages of this layout."""
        fmt = layout.format
        num_kept = 2 * fmt.key.kept_pairs
        return cls(
            head_dim=layout.head_dim,
            channels=max(32, _power_of_two(layout.head_dim)),
            group=group,
            heads=max(8, _power_of_two(group)),
            sinks=fmt.sinks,
            ring=fmt.ring_size,
            window_splits=-(-fmt.window_size // WINDOW_SPLIT),
            keys=RecordSide.of(layout, "key"),
            values=RecordSide.of(layout, "value"),
            num_kept=num_kept,
            kept=layout.planes["kept_pair"].offset // 2 if num_kept else 0,
            sliding_window=sliding_window,
        )


@dataclass(frozen=True)
class DecodeTuning:
    """How a decode kernel does its work; results differ by rounding only.

    Attributes:
        warps: of one program, a power of two; each works on tokens of its own.
        programs_per_sm: that the registers of a multiprocessor have to suffice for.
        stages: of the loop over pages: tiles in flight per warp, the one at work included.
        tile: tokens of pages that a warp works on at a time.
        wide_tile: tokens of windows, in 16 bit, that a warp works on at a time; of pages in 16 bit as many.
    """

    warps: int
    programs_per_sm: int
    stages: int
    tile: int
    wide_tile: int

    @property
    def max_registers(self) -> int:
        """Of a thread."""
        return min(255, _REGISTERS_PER_SM // (self.programs_per_sm * self.warps * 32) // 8 * 8)


def tune_decode(shape: DecodeShape, removed_mean: bool, warps: int = 4) -> DecodeTuning:
    """Tiles as large as registers allow: what is done once per tile (maxima, decay of the sums) is then cheapest.

    A tile of `kv2` at head_dim 128 is a page: 64 x 16 words are 16 registers, and with as many for scores, 16 for the
    query, 32 for sums and 8 for each of five numbers per token a thread gets along with 168, twelve warps per
    multiprocessor. Twice the words (`kv4`), or the mean key, take eight.

    Of pages in 16 bit one tile is on its way while another is worked on, 8 KB a warp at head_dim 128: 64 KB of a
    multiprocessor keep the memory busy. At head_dim 256, or for 32 heads, there are no registers for it.
    """
    words = max(shape.keys.padded_words, shape.values.padded_words)
    tile = max(16, min(PAGE_SIZE, 2048 // words, 512 // shape.heads))
    wide_tile = max(16, min(PAGE_SIZE, 2048 // shape.channels))
    crowded = tile * words > 1024 or shape.channels * shape.heads > 1024 or removed_mean
    stages = 5
    if shape.keys.grid is None:
        tile = wide_tile
        stages = 3 if shape.channels <= 128 and shape.heads <= 16 else 1
    return DecodeTuning(warps, (8 if crowded else 12) // warps, stages, tile=tile, wide_tile=wide_tile)


@dataclass(frozen=True)
class DecodePlan:
    """How the programs of one launch share its work; the same plan gives the same bits.

    Attributes:
        page_splits: programs that share the pages of one sequence and KV head. How many of them have work is decided
            on the device, by the sequence's length.
        pages_per_split: pages that a program takes before another one gets any; twice as many before more than
            `FEW_SPLITS` programs share them.
        tuning: of the kernel.
    """

    page_splits: int
    pages_per_split: int
    tuning: DecodeTuning


def plan_decode(
    shape: DecodeShape, removed_mean: bool, batch: int, num_kv_heads: int, max_pages: int, num_sms: int
) -> DecodePlan:
    """The plan for a batch of sequences of up to `max_pages` pages on a GPU of `num_sms` multiprocessors.

    One wave of programs is best while sequences and heads are few, and few large programs are better than many: every
    split is one more partial result for the last program to add up, while all others have nothing to do. Programs are
    twice as large where `FEW_SPLITS` of them would not give each multiprocessor two. Examples for `kv2` on 132
    multiprocessors, which hold 396 programs of 4 warps: one sequence of 512 pages (32k tokens) and 8 heads could have
    49 splits and uses 32, of 16 pages; 32 such sequences are 256 pairs of sequence and head, which would leave a
    third of the GPU idle with one split each, and get 6 splits of 86 pages.
    """
    pairs = batch * num_kv_heads
    tuning = tune_decode(shape, removed_mean, warps=8 if FEW_SPLITS * pairs < 2 * num_sms - FEW_SPLITS else 4)
    resident = tuning.programs_per_sm * num_sms
    programs = resident if _WAVES * pairs <= resident else _WAVES * resident
    pages_per_split = _TILES_PER_WARP * tuning.warps * tuning.tile // PAGE_SIZE
    useful = -(-max_pages // pages_per_split)
    return DecodePlan(max(1, min(programs // pairs, useful)), pages_per_split, tuning)


def _power_of_two(n: int) -> int:
    """The next power of two from n on."""
    return 1 << (n - 1).bit_length()
