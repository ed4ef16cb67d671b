"""Measurements of mixtures of experts as rows for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from subten.bench.machine import Machine
from subten.bench.terminal import machine_table, number


@dataclass(frozen=True)
class MoERow:
    """One way to compute one block for some tokens. A figure that is not there is None; `note` says why.

    Attributes:
        shape: name of the model.
        tokens: of the batch.
        weights: of the experts: "bf16", or FP8 with scales by "channel" or "block".
        kernel: "gluon" or "triton", of more than 64 tokens one launch for 64 behind the other; or "unfused", with
            experts in FP8 restored in the call.
        activations: what weights are multiplied with.
        sums: how outputs are added up.
        distinct_experts: that the tokens visit, mean over the layers.
        us: microseconds of one layer from router logits to output, median over the replays.
        us_p10: 10th percentile.
        us_p90: 90th percentile.
        bytes: that must be read and written at least: visited experts, the shared one, tokens in and out.
        floor_us: bytes at the rate at which the machine reads memory.
        share: floor_us / us.
        error: relative, against float64 on the same weights.
        peer: the fastest peer.
        peer_us: its time.
        ratio: peer_us / us.
        peers: all peers' times by name.
        note: why a figure is not there, or None.
    """

    shape: str
    tokens: int
    weights: str
    kernel: str
    activations: str
    sums: str
    distinct_experts: float
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


def moe_line(row: MoERow) -> str:
    """A row as it comes, on one line."""
    head = f"{row.shape:>13} {row.tokens:4} {row.weights:<7} {row.kernel:<7} {row.activations:<5} {row.sums:<5}"
    if row.us is None:
        return f"{head} no figure: {row.note}"
    figures = (
        f"{row.us:8.1f} us  floor {row.floor_us:7.1f} ({row.share or 0:4.0%})  experts {row.distinct_experts:5.1f}"
        f"  {row.peer or 'no peer'} {number(row.peer_us, '.1f')}  ratio {number(row.ratio, '.2f')}"
        f"  error {number(row.error, '.1e')}"
    )
    return f"{head} {figures}" + (f"  ({row.note})" if row.note else "")


def moe_table(rows: Sequence[MoERow], machine: Machine) -> Table:
    """All rows; notes below."""
    table = machine_table(
        machine,
        "us of one layer.",
        (row.note for row in rows),
        ("shape", "weights", "kernel", "activations", "sums"),
        ("tokens", "experts", "us", "floor", "share", "peer us", "ratio", "error"),
    )
    table.add_column("peer")
    for row in rows:
        table.add_row(
            row.shape,
            row.weights,
            row.kernel,
            row.activations,
            row.sums,
            str(row.tokens),
            f"{row.distinct_experts:.1f}",
            number(row.us, ".1f"),
            f"{row.floor_us:.1f}",
            number(row.share, ".0%"),
            number(row.peer_us, ".1f"),
            number(row.ratio, ".2f"),
            number(row.error, ".1e"),
            row.peer or "-",
        )
    return table
