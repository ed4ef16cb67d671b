"""Measurements of chunks of prompts as rows for programs and as lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from subten.bench.latency_report import Profile
from subten.bench.machine import Machine
from subten.bench.shapes import context_name
from subten.bench.terminal import machine_table, number


@dataclass(frozen=True)
class PrefillRow:
    """A chunk of a prompt behind a context. A figure that is not there is None; `note` says why.

    Attributes:
        shape: name of the model.
        kv: format of the cache.
        context: tokens that the sequence holds before the chunk.
        chunk_size: tokens of the chunk.
        attention: implementation.
        weights: see `LatencyRow.weights`.
        chunks: that were timed.
        p50_ms: of a chunk, from its first launch to the logits of its last token: median.
        max_ms: the slowest.
        host_ms: until the host had launched all of it, median: where this is about `p50_ms`, the host bounds it.
        tokens_per_s: chunk_size / p50_ms.
        flops: floating-point operations of its products.
        bytes: weights, visited experts and the context, each read once.
        tflop_per_s: flops / p50_ms.
        product_tflop_per_s: what a large product in 16 bit reaches on this machine, measured in the same run.
        floor_ms: the longer one of `flops` at that rate and `bytes` at the rate at which the machine reads.
        share: floor_ms / p50_ms.
        profile: of a chunk, where it was asked for.
        note: why a figure is not there, or None.
    """

    shape: str
    kv: str
    context: int
    chunk_size: int
    attention: str | None = None
    weights: str | None = None
    chunks: int | None = None
    p50_ms: float | None = None
    max_ms: float | None = None
    host_ms: float | None = None
    tokens_per_s: float | None = None
    flops: int | None = None
    bytes: int | None = None
    tflop_per_s: float | None = None
    product_tflop_per_s: float | None = None
    floor_ms: float | None = None
    share: float | None = None
    profile: Profile | None = None
    note: str | None = None


def prefill_line(row: PrefillRow) -> str:
    """A row as it comes, on one line."""
    head = f"{row.shape:>13} {row.kv:<5} {row.chunk_size:5} behind {context_name(row.context):>5}"
    if row.p50_ms is None:
        return f"{head} no figure: {row.note}"
    return (
        f"{head} p50 {row.p50_ms:8.2f} ms  max {number(row.max_ms, '.2f')}  host {number(row.host_ms, '.2f')}"
        f"  {number(row.tokens_per_s, '.0f')} tok/s  {number(row.tflop_per_s, '.1f')} TFLOP/s"
        f"  floor {number(row.floor_ms, '.2f')} ({number(row.share, '.0%')})"
    )


def prefill_table(rows: Sequence[PrefillRow], machine: Machine) -> Table:
    """All rows; notes below."""
    table = machine_table(
        machine,
        "A chunk of a prompt behind a context.",
        (row.note for row in rows),
        ("shape", "kv"),
        ("context", "chunk", "p50 ms", "max", "host", "tok/s", "TFLOP/s", "floor ms", "share"),
    )
    for row in rows:
        table.add_row(
            row.shape,
            row.kv,
            context_name(row.context),
            str(row.chunk_size),
            number(row.p50_ms, ".2f"),
            number(row.max_ms, ".2f"),
            number(row.host_ms, ".2f"),
            number(row.tokens_per_s, ".0f"),
            number(row.tflop_per_s, ".1f"),
            number(row.floor_ms, ".2f"),
            number(row.share, ".0%"),
        )
    return table
