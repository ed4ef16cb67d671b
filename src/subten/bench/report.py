"""Measurements as rows for programs and as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from subten.bench.machine import Machine
from subten.bench.shapes import Case, Shape, context_name
from subten.bench.terminal import machine_table, new_table, number


@dataclass(frozen=True)
class AttentionRow:
    """One kernel on one cache, beside its peers. A figure that is not there is None; `note` says why.

    Attributes:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of one.
        head_dim: channels.
        context: tokens that a query reads, its own included.
        format: of the cache.
        kernel: implementation.
        mean_key: whether scores get the term of a mean key.
        us: microseconds of one layer, median over the replays.
        us_p10: 10th percentile.
        us_p90: 90th percentile.
        baseline_us: of torch's fastest attention in 16 bit.
        baseline: which one that was.
        ratio: baseline_us / us.
        fa3_us: of FlashAttention-3 in 16 bit.
        fa3_fp8_us: of FlashAttention-3 with keys, values and queries in FP8.
        bytes: that the layer must read and write at least (`subten.kernels.attention.cost`).
        tb_per_s: bytes / us, in 10^12 bytes per second.
        read_share: of the rate at which the machine reads memory.
        error: relative, against the torch reference on this very cache.
        note: why a figure is not there, or None.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    format: str
    kernel: str
    mean_key: bool
    us: float | None
    us_p10: float | None
    us_p90: float | None
    baseline_us: float | None
    baseline: str | None
    ratio: float | None
    fa3_us: float | None
    fa3_fp8_us: float | None
    bytes: int
    tb_per_s: float | None
    read_share: float | None
    error: float | None
    note: str | None

    @property
    def case(self) -> Case:
        """Shape and context."""
        return Case(Shape(self.batch, self.kv_heads, self.group, self.head_dim), self.context)


@dataclass(frozen=True)
class AppendRow:
    """`kv_append` of a decode step, per layer: q/k norm, RoPE, window, coded query; and the codes of all layers.

    Attributes:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of one.
        head_dim: channels.
        format: of the cache.
        layers: of the cache.
        us: append_us + encode_us / layers.
        append_us: the launch of each layer.
        encode_us: the launch for all layers.
        error: relative, of queries, keys and codes, against torch.
        note: why a figure is not there, or None.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    format: str
    layers: int
    us: float | None
    append_us: float | None
    encode_us: float | None
    error: float | None
    note: str | None


@dataclass(frozen=True)
class Crossover:
    """From which context on a kernel is faster than 16 bit.

    Attributes:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of one.
        head_dim: channels.
        format: of the cache.
        kernel: implementation.
        mean_key: whether scores get the term of a mean key.
        context: the smallest measured one from which on all are faster; None where the longest is not.
        lowest_ratio: over all measured contexts.
        lowest_ratio_context: where that is.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    format: str
    kernel: str
    mean_key: bool
    context: int | None
    lowest_ratio: float
    lowest_ratio_context: int


def crossovers(rows: Iterable[AttentionRow]) -> list[Crossover]:
    """Of each shape, format and kernel that was measured at two contexts or more."""

    def series(row: AttentionRow) -> tuple[int, int, int, int, str, str, bool]:
        return row.batch, row.kv_heads, row.group, row.head_dim, row.format, row.kernel, row.mean_key

    measured = sorted((row for row in rows if row.ratio is not None), key=lambda row: (*series(row), row.context))
    found = []
    for key, group in groupby(measured, key=series):
        ratios = [(row.context, row.ratio) for row in group if row.ratio is not None]
        if len(ratios) < 2:
            continue
        faster = None
        for context, ratio in reversed(ratios):
            if ratio < 1:
                break
            faster = context
        at, lowest = min(ratios, key=lambda pair: pair[1])
        found.append(Crossover(*key, context=faster, lowest_ratio=lowest, lowest_ratio_context=at))
    return found


# --- for people ------------------------------------------------------------------------------------------------


def row_line(row: AttentionRow) -> str:
    """A row as it comes, on one line."""
    head = f"{row.case.shape!s:>8} {context_name(row.context):>5} {_name(row):<26}"
    if row.us is None:
        return f"{head} no figure: {row.note}"
    figures = (
        f"{row.us:8.1f} us  16 bit {number(row.baseline_us, '8.1f')}  ratio {number(row.ratio, '5.2f')}"
        f"  fa3 {number(row.fa3_us, '7.1f')}  fp8 {number(row.fa3_fp8_us, '7.1f')}"
        f"  {number(row.tb_per_s, '5.2f')} TB/s  {number(row.read_share, '4.0%')}"
        f"  error {number(row.error, '.1e')}"
    )
    return f"{head} {figures}" + (f"  ({row.note})" if row.note else "")


def append_line(row: AppendRow) -> str:
    """A row as it comes, on one line."""
    head = f"kv_append batch {row.batch} {row.format}"
    if row.us is None:
        return f"{head} no figure: {row.note}"
    return (
        f"{head} {row.us:.2f} us per layer (append {number(row.append_us, '.2f')}, "
        f"codes of {row.layers} layers {number(row.encode_us, '.1f')}), error {number(row.error, '.1e')}"
    )


def attention_table(rows: Sequence[AttentionRow], machine: Machine) -> Table:
    """All rows; notes below."""
    table = machine_table(
        machine,
        "us of one layer.",
        (row.note for row in rows),
        ("shape", "context", "cache"),
        ("us", "16 bit", "ratio", "fa3", "fa3 fp8", "TB/s", "of reading", "error"),
    )
    for row in rows:
        table.add_row(
            str(row.case.shape),
            context_name(row.context),
            _name(row),
            number(row.us, ".1f"),
            number(row.baseline_us, ".1f"),
            number(row.ratio, ".2f"),
            number(row.fa3_us, ".1f"),
            number(row.fa3_fp8_us, ".1f"),
            number(row.tb_per_s, ".2f"),
            number(row.read_share, ".0%"),
            number(row.error, ".1e"),
        )
    return table


def crossover_table(found: Sequence[Crossover]) -> Table:
    """From which context on each kernel is faster than 16 bit."""
    table = new_table("Faster than 16 bit", None, ("shape", "cache"), ("from context", "lowest ratio", "at"))
    for x in found:
        table.add_row(
            str(Shape(x.batch, x.kv_heads, x.group, x.head_dim)),
            _name(x),
            "never" if x.context is None else context_name(x.context),
            f"{x.lowest_ratio:.2f}",
            context_name(x.lowest_ratio_context),
        )
    return table


def append_table(rows: Sequence[AppendRow]) -> Table:
    """kv_append per layer; notes below."""
    notes = sorted({row.note for row in rows if row.note})
    table = new_table(
        "kv_append, us",
        "; ".join(notes) or None,
        ("batch", "format"),
        ("per layer", "append", "codes of all layers", "layers", "error"),
    )
    for row in rows:
        table.add_row(
            str(row.batch),
            row.format,
            number(row.us, ".2f"),
            number(row.append_us, ".2f"),
            number(row.encode_us, ".1f"),
            str(row.layers),
            number(row.error, ".1e"),
        )
    return table


def _name(row: AttentionRow | Crossover) -> str:
    return f"{row.format} {row.kernel}" + (" + mean key" if row.mean_key else "")
