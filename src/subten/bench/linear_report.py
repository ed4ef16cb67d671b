"""Measurements of linear layers as rows for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from subten.bench.machine import Machine
from subten.bench.terminal import machine_table, number

KERNELS = ("gluon", "triton")
"""In order of preference, as they are chosen where they serve."""


@dataclass(frozen=True)
class LinearRow:
    """One kernel on one layer for some tokens. A figure that is not there is None; `note` says why.

    Attributes:
        layer: "qkv", "o", "router" or "vocabulary" of a model; of any other, what belongs to it.
        outputs: channels.
        inputs: channels.
        tokens: of the batch.
        weights: "bf16", or "fp8" with a scale for each output channel.
        kernel: "gluon" or "triton".
        us: microseconds of one layer in a chain of its copies, median over the replays.
        us_p10: 10th percentile.
        us_p90: 90th percentile.
        bytes: that must be read and written at least: weights, tokens in and out.
        floor_us: bytes at the rate at which the machine reads memory.
        share: floor_us / us.
        error: relative, against float64 on the same weights.
        peer: the fastest peer.
        peer_us: its time.
        ratio: peer_us / us.
        peers: all peers' times by name.
        note: why a figure is not there, or None.
    """

    layer: str
    outputs: int
    inputs: int
    tokens: int
    weights: str
    kernel: str
    us: float | None
    us_p10: float | None
    us_p90: float | None
    bytes: int
    floor_us: float
    share: float | None
    error: float | None
    peer: str | None
    peer_us: float | None
    ratio: float | None
    peers: Mapping[str, float]
    note: str | None

    @property
    def size(self) -> str:
        """OUTPUTSxINPUTS."""
        return f"{self.outputs}x{self.inputs}"


def linear_line(row: LinearRow) -> str:
    """A row as it comes, on one line."""
    head = f"{row.layer:>10} {row.size:>12} {row.tokens:2} {row.weights:<4} {row.kernel:<6}"
    if row.us is None:
        return f"{head} no figure: {row.note}"
    figures = (
        f"{row.us:8.2f} us  floor {row.floor_us:7.2f} ({row.share or 0:4.0%})  {row.peer or 'no peer'} "
        f"{number(row.peer_us, '.2f')}  ratio {number(row.ratio, '.2f')}  error {number(row.error, '.1e')}"
    )
    return f"{head} {figures}" + (f"  ({row.note})" if row.note else "")


def linear_table(rows: Sequence[LinearRow], machine: Machine) -> Table:
    """All rows; notes below."""
    table = machine_table(
        machine,
        "us of one layer.",
        (row.note for row in rows),
        ("layer", "size", "weights", "kernel"),
        ("tokens", "us", "floor", "share", "peer us", "ratio", "error"),
    )
    table.add_column("peer")
    for row in rows:
        table.add_row(
            row.layer,
            row.size,
            row.weights,
            row.kernel,
            str(row.tokens),
            number(row.us, ".2f"),
            f"{row.floor_us:.2f}",
            number(row.share, ".0%"),
            number(row.peer_us, ".2f"),
            number(row.ratio, ".2f"),
            number(row.error, ".1e"),
            row.peer or "-",
        )
    return table
