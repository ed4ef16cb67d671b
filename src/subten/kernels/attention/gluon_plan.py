"""What the Gluon decode kernel is told beyond its tensors: what it is compiled for, and how a launch is split."""

from __future__ import annotations

from dataclasses import dataclass

from subten.formats.layout import PageLayout
from subten.formats.spec import TensorFormat

HEAD_DIMS = (64, 128, 256)

_WINDOW_TILE = 16
"""Window tokens of a warp at a time: that takes it about as long as a page of codes."""
_REGISTERS_PER_SM = 65536
_MOST_SPLITS = 49
"""Of one sequence and KV head; the last program to arrive adds up what all have found, while the others are gone."""
_MOST_PAGES_PER_WARP = 128
"""The tensor core rounds sums towards zero. That is little of a sum of codes, which are not negative, but not of what
is left of it when many tokens with weights alike average to little: seen at 512 pages per warp."""
_FEW_PAGES_PER_SM = 48
"""One sequence of 32k tokens and 8 KV heads has 31 on a GPU of 132 multiprocessors."""
_FIXED_ROUNDS = 4
"""What a program costs beside its pages, in rounds of a page per warp: launch, query, merging of the warps, and the
wait for the last one."""


@dataclass(frozen=True)
class GluonShape:
    """What of a layer the kernel is compiled for. Offsets in a record count int16 words.

    Attributes:
        head_dim: channels of a head.
        group: query heads of one KV head.
        tiles: of four heads, in one program.
        window_units: pages that the windows count as, when work is shared.
        sinks: tokens at the start that stay in 16 bit.
        ring: tokens at the end that do.
        key_scale: offset of the keys' grids.
        value_codes: offset of the values' codes.
        value_scale: offset of the values' grids.
        kept: offset of the kept pairs, the last plane.
        record_bytes: of a page and head.
        mean_pairs: rotary pairs, a multiple of eight, in which a mean key was taken out of the keys; 0 for none.
        sliding_window: tokens that a query sees, itself included; None means all.
    """

    head_dim: int
    group: int
    tiles: int
    window_units: int
    sinks: int
    ring: int
    key_scale: int
    value_codes: int
    value_scale: int
    kept: int
    record_bytes: int
    mean_pairs: int
    sliding_window: int | None

    @property
    def blocks(self) -> int:
        """Programs that share the query heads of one KV head."""
        return -(-self.group // (4 * self.tiles))

    @classmethod
    def of(cls, layout: PageLayout, group: int, mean_pairs: int, sliding_window: int | None = None) -> GluonShape:
        """Of a layer with pages that `why_not_gluon` has no objection to."""
        fmt = layout.format
        words = {name: plane.offset // 2 for name, plane in layout.planes.items()}
        return cls(
            head_dim=layout.head_dim,
            group=group,
            tiles=head_tiles(group),
            window_units=-(-fmt.window_size // _WINDOW_TILE),
            sinks=fmt.sinks,
            ring=fmt.ring_size,
            key_scale=words["key_scale"],
            value_codes=words["value_codes"],
            value_scale=words["value_scale"],
            kept=words["kept_pair"],
            record_bytes=layout.record_bytes,
            mean_pairs=mean_pairs,
            sliding_window=sliding_window,
        )


def head_tiles(group: int) -> int:
    """Tiles of four query heads in one program; a larger group than eight is shared by several programs."""
    return 1 if group <= 4 else 2


@dataclass(frozen=True)
class GluonTuning:
    """How the kernel goes through its work.

    Attributes:
        warps: of a program, a power of two.
        registers: of a thread.
        pages: that a warp has in flight at a time.
        overlap: whether programs begin while the kernel before this one ends. They only ask for pages of codes before
            they wait for its results (programmatic dependent launch).
    """

    warps: int
    registers: int
    pages: int = 1
    overlap: bool = True

    def programs_per_sm(self) -> int:
        """That the registers of a multiprocessor suffice for."""
        return _REGISTERS_PER_SM // (32 * self.warps * self.registers)

    def parts_per_warp(self, head_dim: int) -> int:
        """Parts that a warp of the last program has in flight when it adds them up: in 64 registers, or 128."""
        floats = 128 if self.registers > 200 and head_dim <= 128 else 64
        return 8 * floats // max(head_dim, 64)


def tune_gluon(shape: GluonShape, pages_per_sm: float) -> GluonTuning:
    """Measured on an H200 (docs/kernels/attention.md), for so many pages of codes per multiprocessor in a launch.

    At head_dim 128, 168 registers beat 128 although twelve warps per multiprocessor then take the place of sixteen:
    all loads of a page are in flight before the first is used. Where a warp has four pages or fewer, what comes after
    them counts for as much: with 255 registers there are fewer programs, and thus fewer parts to add up. A mean key
    is worth two pages at a time, as both share its tensor core step; with eight heads it takes all registers for one
    page, as head_dim 256 does, which has twice the sums.
    """
    if shape.head_dim == 64:
        return GluonTuning(warps=4, registers=128 if shape.tiles == 1 and not shape.mean_pairs else 168)
    if shape.head_dim == 256:
        return GluonTuning(warps=4, registers=255)
    if shape.mean_pairs:
        return GluonTuning(warps=4, registers=255, pages=3 - shape.tiles)
    return GluonTuning(warps=4, registers=255 if pages_per_sm <= _FEW_PAGES_PER_SM else 168)


@dataclass(frozen=True)
class GluonPlan:
    """How the programs of one launch share its work; the same plan gives the same bits.

    Attributes:
        splits: programs that share one sequence and KV head. How many of them have work is decided on the device, by
            the sequence's length.
        units_per_split: pages that a program takes before another one gets any.
        tuning: of the kernel.
    """

    splits: int
    units_per_split: int
    tuning: GluonTuning


def plan_gluon(
    shape: GluonShape, batch: int, num_kv_heads: int, max_pages: int, num_sms: int, tuning: GluonTuning | None = None
) -> GluonPlan:
    """The plan for a batch of sequences of up to `max_pages` pages on a GPU of `num_sms` multiprocessors.

    A launch takes as many waves as its programs need of the places there are, and a wave as many rounds as a program
    has pages per warp, and some more (`_FIXED_ROUNDS`). Examples for head_dim 128 in groups of 4 on 132
    multiprocessors: one sequence of 512 pages (32k tokens) and 8 heads gets 33 splits on 264 places, four rounds
    each. 8 sequences have 396 places and get 6 splits, one wave of 384 programs: 7 would be two waves. 32 sequences
    are 256 pairs of sequence and head: one split each would leave a third of the GPU idle, two would take two waves
    for one and a third; they get 3, two full waves.
    """
    pairs = batch * num_kv_heads * shape.blocks
    tuning = tuning or tune_gluon(shape, pairs * max_pages / num_sms)
    places = tuning.programs_per_sm() * num_sms
    units, units_per_split = max_pages + shape.window_units, tuning.warps
    least = max(1, -(-max_pages // (_MOST_PAGES_PER_WARP * tuning.warps)))
    most = max(least, min(_MOST_SPLITS, -(-units // units_per_split)))

    def rounds(splits: int) -> int:
        waves = -(-pairs * splits // places)
        pages = -(-units // splits)
        at_once = tuning.warps * tuning.pages
        return waves * (-(-pages // at_once) * tuning.pages + _FIXED_ROUNDS)

    return GluonPlan(min(range(least, most + 1), key=rounds), units_per_split, tuning)


def why_not_gluon(layout: PageLayout) -> str | None:
    """Why the Gluon kernel does not serve a layout, or None where it does."""
    fmt = layout.format
    if not (_two_bit(fmt.key) and _two_bit(fmt.value) and fmt.key.kept_pairs == 1 and fmt.key.transform != "none"):
        return f"the gluon kernel serves kv2 and kv2-plain, not the KV format '{fmt.name}'; choose the triton one"
    if layout.head_dim not in HEAD_DIMS:
        return f"the gluon kernel serves head_dim 64, 128 and 256, not {layout.head_dim}; choose the triton one"
    return None


def _two_bit(fmt: TensorFormat) -> bool:
    return (
        fmt.code == "uniform"
        and fmt.bits == 2
        and fmt.affine == "packed"
        and fmt.fit == "least_squares"
        and fmt.group is None
        and not fmt.by_page
    )
