"""Measurements of decode steps as rows for programs and as tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from subten.bench.machine import Machine
from subten.bench.shapes import context_name
from subten.bench.terminal import machine_table, number
from subten.errors import StorageError


@dataclass(frozen=True)
class KernelTime:
    """What a kernel takes of one step.

    Attributes:
        name: of the kernel.
        launches: in a step.
        us: of all of them together.
    """

    name: str
    launches: float
    us: float


@dataclass(frozen=True)
class Profile:
    """A step by kernels.

    Attributes:
        of: `graph`, or `eager` where a graph's kernels can't be seen.
        launches: of all kernels.
        us: of all kernels together, one behind the other.
        kernels: those that take longest.
    """

    of: str
    launches: float
    us: float
    kernels: Sequence[KernelTime]


@dataclass(frozen=True)
class StepTimes:
    """What was measured of one batch, in milliseconds where nothing else is said.

    Attributes:
        steps: that were timed.
        p50_ms: of a step, from the host's launch to the tokens in its hands: median.
        p99_ms: 99th percentile.
        max_ms: the slowest.
        loop_p50_ms: from one step's tokens to the next one's, with the books in between.
        loop_p99_ms: likewise.
        device_ms: what the device takes for the graph of a step, median; None where there is none.
        host_ms: what is left of `loop_p50_ms` where the graph does nothing.
        experts: that a layer's tokens visit, mean over the layers; None where there are none.
        bytes: that a step must read at least (`latency_cases.step_bytes`).
        cache_bytes: pages and windows that the sequences held at the end.
        bits: per element of K and V, windows and unfilled slots of pages included.
        compilations: kernels compiled during the timed steps.
        device_allocations: times that the device was asked for memory during the timed steps.
        sm_mhz: clock of the GPU's multiprocessors in the middle of such steps; None where it is not known.
        power_w: watts that the GPU draws then; likewise.
    """

    steps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    loop_p50_ms: float
    loop_p99_ms: float
    device_ms: float | None
    host_ms: float
    experts: float | None
    bytes: int
    cache_bytes: int
    bits: float
    compilations: int
    device_allocations: int
    sm_mhz: float | None
    power_w: float | None


@dataclass(frozen=True)
class LatencyRow:
    """Decode steps of one model, batch and cache. A figure that is not there is None; `note` says why.

    Attributes:
        shape: name of the model.
        batch: sequences.
        context: tokens of the longest sequence at the end.
        kv: format of the cache.
        moe: `fused` or `unfused`.
        attention: implementation.
        weights: `fp8 channel` or `fp8 block` by the experts' scales; of a model by name, what of them is in FP8
            (`load_model`).
        weights_gb: of all weights, in 10^9 bytes.
        steps: see `StepTimes`, as the next ones.
        p50_ms: see there.
        p99_ms: see there.
        p99_over_p50: p99_ms / p50_ms.
        max_ms: see there.
        loop_p50_ms: see there.
        loop_p99_ms: see there.
        device_ms: see there.
        host_ms: see there.
        tokens_per_s: of the batch: batch / loop_p50_ms.
        experts: see there.
        bytes: see there.
        gb_per_s: bytes / p50_ms.
        roofline_ms: bytes at the rate at which the machine reads memory, measured in the same run.
        share: roofline_ms / p50_ms.
        cache_gb: of the batch, in 10^9 bytes.
        bits: see there.
        compilations: see there.
        device_allocations: see there.
        sm_mhz: see there.
        power_w: see there.
        profile: of a step, where it was asked for.
        note: why a figure is not there, or None.
    """

    shape: str
    batch: int
    context: int
    kv: str
    moe: str
    attention: str | None = None
    weights: str | None = None
    weights_gb: float | None = None
    steps: int | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    p99_over_p50: float | None = None
    max_ms: float | None = None
    loop_p50_ms: float | None = None
    loop_p99_ms: float | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    tokens_per_s: float | None = None
    experts: float | None = None
    bytes: int | None = None
    gb_per_s: float | None = None
    roofline_ms: float | None = None
    share: float | None = None
    cache_gb: float | None = None
    bits: float | None = None
    compilations: int | None = None
    device_allocations: int | None = None
    sm_mhz: float | None = None
    power_w: float | None = None
    profile: Profile | None = None
    note: str | None = None


@dataclass(frozen=True)
class LargestRow:
    """The largest batch whose steps stay below a limit. A figure that is not there is None.

    Attributes:
        shape: name of the model.
        context: tokens of the longest sequence.
        kv: format of the cache.
        moe: `fused` or `unfused`.
        limit_ms: of `p99_ms`.
        batch: the largest one measured below it; None where not even one sequence is.
        p99_ms: of it.
        next_batch: the next larger one, at or above the limit; None where none was.
        next_p99_ms: of it.
        note: what ended the search instead, or None.
    """

    shape: str
    context: int
    kv: str
    moe: str
    limit_ms: float
    batch: int | None
    p99_ms: float | None
    next_batch: int | None
    next_p99_ms: float | None
    note: str | None


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that so many percent of all do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def read_latency(path: Path) -> tuple[Machine, list[LatencyRow], list[LargestRow]]:
    """The rows of a file of decode steps.

    Raises:
        StorageError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [_latency_row(**row) for row in content["latency"]]
        return Machine(**content["machine"]), rows, [LargestRow(**row) for row in content["largest"]]
    except FileNotFoundError as error:
        raise StorageError(f"there is no file {path}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is no file of decode steps: {error}") from error


def _latency_row(*, profile: Any, **fields: Any) -> LatencyRow:
    if profile is not None:
        profile = Profile(**{**profile, "kernels": [KernelTime(**kernel) for kernel in profile["kernels"]]})
    return LatencyRow(**fields, profile=profile)


def latency_line(row: LatencyRow) -> str:
    """A row as it comes, on one line."""
    head = f"{row.shape:>13} {row.batch:3} x {context_name(row.context):>4} {row.kv:<5} {row.moe:<7}"
    if row.p50_ms is None:
        return f"{head} no figure: {row.note}"
    return (
        f"{head} p50 {row.p50_ms:7.3f} ms  p99 {number(row.p99_ms, '7.3f')} ({number(row.p99_over_p50, '.3f')})"
        f"  device {number(row.device_ms, '.3f')}  host {number(row.host_ms, '.3f')}"
        f"  roofline {number(row.roofline_ms, '.3f')} ({number(row.share, '.0%')})"
        f"  cache {number(row.cache_gb, '.2f')} GB  {number(row.bits, '.2f')} bits"
    ) + (f"  ({row.note})" if row.note else "")


def largest_line(row: LargestRow) -> str:
    """Likewise."""
    head = f"{row.shape:>13} largest at {context_name(row.context)} {row.kv:<5} {row.moe:<7}"
    found = "none" if row.batch is None else f"batch {row.batch}, p99 {number(row.p99_ms, '.2f')} ms"
    beyond = "" if row.next_batch is None else f"; {row.next_batch} takes {number(row.next_p99_ms, '.2f')} ms"
    return f"{head} {found}{beyond}" + (f" ({row.note})" if row.note else "")


def latency_table(rows: Sequence[LatencyRow], machine: Machine) -> Table:
    """All rows; notes below."""
    figures = (
        "context",
        "batch",
        "p50",
        "p99",
        "p99/p50",
        "device",
        "host",
        "roofline",
        "share",
        "tok/s",
        "GB",
        "bits",
    )
    table = machine_table(
        machine, "ms of one decode step.", (row.note for row in rows), ("shape", "kv", "moe"), figures
    )
    for row in rows:
        table.add_row(
            row.shape,
            row.kv,
            row.moe,
            context_name(row.context),
            str(row.batch),
            number(row.p50_ms, ".3f"),
            number(row.p99_ms, ".3f"),
            number(row.p99_over_p50, ".3f"),
            number(row.device_ms, ".3f"),
            number(row.host_ms, ".3f"),
            number(row.roofline_ms, ".3f"),
            number(row.share, ".0%"),
            number(row.tokens_per_s, ".0f"),
            number(row.cache_gb, ".2f"),
            number(row.bits, ".2f"),
        )
    return table


def profile_lines(found: Profile | None) -> list[str]:
    """The kernels of a step, a line each; none where it was not taken apart."""
    if found is None:
        return []
    lines = [f"       a step as {found.of}: {found.us:.0f} us in {found.launches:.0f} launches"]
    return lines + [f"       {k.us:9.1f} us {k.launches:6.0f} x  {k.name[:100]}" for k in found.kernels]
