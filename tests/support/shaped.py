"""Noise-shaped rounding once more: float64, numpy, one row at a time, from its definition.

The metric says what an error e costs: e^T metric e. Coordinates are taken from the costliest to the cheapest.

1. Each coordinate goes to the level nearest to where it would have to be, if all coordinates behind it, not yet
   rounded, were moved to where they make up best for the errors so far.
2. Scale and offset are fitted to the codes, and rounded to how they are stored. Then each coordinate goes to the
   level that costs least while all others stay.
3. Scale and offset are fitted again, raised until what is read is as long as the row in the row's direction, and
   stored.

As in `support.quantizers`, a row in which a decision hangs by a float32 error is not `sure`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subten.formats.shaping import DAMPING
from support.quantizers import Array, stored_line

MARGIN = 5e-5
"""Distance from the middle between two codes, in steps, below which float32 may decide otherwise. Wider than for
single roundings: in a shaped row errors add up over the coordinates before."""

SLACK = 5e-7
"""Error of a float32 fit, as a share of the row's deviation and mean, where nothing cancels."""


@dataclass(frozen=True)
class Shaped:
    """Codes, scale and offset of a row, and whether every decision in it was clear-cut."""

    codes: NDArray[np.int64]
    scale: float
    offset: float
    sure: bool


class Rounder:
    """Decides codes, and remembers how close a decision was."""

    def __init__(self, bits: int) -> None:
        self.largest = 2**bits - 1
        self.closest = np.inf

    def __call__(self, x: float) -> float:
        boundaries = np.arange(self.largest) + 0.5
        self.closest = min(self.closest, np.abs(x - boundaries).min())
        return float(np.clip(np.round(x), 0, self.largest))


def damped(metric: Array) -> Array:
    """A mean diagonal of 1 (the identity where the metric is zero), and some of that added to all of it; in numbers
    of float16."""
    mean = np.diag(metric).mean()
    exact = (metric / mean if mean > 0 else np.eye(len(metric))) + DAMPING * np.eye(len(metric))
    return exact.astype(np.float16).astype(np.float64)


def make_up(metric: Array) -> list[Array]:
    """For each coordinate i, how far the errors e[:i] want it moved: -(M[i:, i:]^-1 M[i:, :i])[0].

    As a matrix, strictly lower, this is A. Where errors are counted from where a coordinate had been moved to, which
    is r = (1 - A) e, it is A (1 - A)^-1: these are the numbers that are rounded to float16.
    """
    one = np.eye(len(metric))
    moves = np.zeros_like(metric)
    for i in range(len(metric)):
        moves[i, :i] = -np.linalg.solve(metric[i:, i:], metric[i:, :i])[0]
    rounded = np.linalg.solve((one - moves).T, moves.T).T.astype(np.float16).astype(np.float64)
    moves = np.linalg.solve(one + rounded, rounded)
    return [moves[i, :i] for i in range(len(metric))]


def fit(row: Array, codes: Array, metric: Array) -> tuple[float, float, float]:
    """The line of least cost through (code, value), and how far a float32 fit may be off."""
    factor = np.linalg.cholesky(metric).T
    lines = factor @ np.stack([codes, np.ones_like(codes)], axis=1)
    scale, offset = np.linalg.lstsq(lines, factor @ row, rcond=None)[0]
    normal = lines.T @ lines
    cancels = normal[0, 0] * normal[1, 1] / np.linalg.det(normal)
    return float(scale), float(offset), SLACK * float(cancels) * (row.std() + abs(row.mean()))


def shaped_row(row: Array, metric: Array, bits: int, packed: bool, moves: list[Array] | None = None) -> Shaped:
    """Code one row.

    Args:
        row: [n].
        metric: [n, n], symmetric, not damped.
        bits: of a code.
        packed: how scale and offset are stored.
        moves: `make_up` of the metric, damped and ordered, to spare computing it for every row.
    """
    metric = damped(metric)
    order = np.argsort(-np.diag(metric), kind="stable")
    row, metric = row[order], metric[np.ix_(order, order)]
    moves = make_up(metric) if moves is None else moves
    rounded = Rounder(bits)

    scale = row.std() * {2: 0.9957, 4: 0.3352}[bits]
    target = (row - row.mean()) / scale + (2**bits - 1) / 2
    codes = np.zeros(len(row))
    for i in range(len(row)):
        codes[i] = rounded(target[i] + moves[i] @ (codes - target)[:i])

    scale, offset, slack = fit(row, codes, metric)
    scale, offset, first_sure = stored_line(scale, offset, bits, slack, packed)
    target = (row - offset) / scale
    for i in range(len(row)):
        others = metric[i] @ (codes - target) - metric[i, i] * (codes[i] - target[i])
        codes[i] = rounded(target[i] - others / metric[i, i])

    scale, offset, slack = fit(row, codes, metric)
    gain = np.clip((row @ metric @ row) / ((scale * codes + offset) @ metric @ row), 1.0, 2.0)
    scale, offset, second_sure = stored_line(scale * gain, offset * gain, bits, slack, packed)
    unordered = np.empty(len(row), dtype=np.int64)
    unordered[order] = codes.astype(np.int64)
    sure = bool(first_sure and second_sure and rounded.closest > MARGIN)
    return Shaped(unordered, scale, offset, sure)


def ordered_moves(metric: Array) -> list[Array]:
    """`make_up` of a metric as `shaped_row` wants it."""
    metric = damped(metric)
    order = np.argsort(-np.diag(metric), kind="stable")
    return make_up(metric[np.ix_(order, order)])
