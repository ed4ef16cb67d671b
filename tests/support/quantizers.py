"""The formats' formulas once more: float64, numpy, one row at a time, written from their definitions.

Rounding to codes and to fp16 is decided here in float64 and in the codec in float32, so a row in which some
decision hangs by less than the float32 error is marked `sure = False` and left out of comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MARGIN = 2e-5
"""Distance from a decision boundary, in steps, below which float32 may decide otherwise."""


LINES = {"kv4": (4, 4), "kv2": (2, 2), "k4v2": (4, 2), "kv2-plain": (2, 2)}
"""Bits of keys and values of the formats that code a token on a straight line after a Hadamard transform. As long as
nothing of a model is known, `kv2` and `kv2-plain` do the same."""


@dataclass(frozen=True)
class Coded:
    """What a row reads back as, and whether every rounding in it was clear-cut."""

    values: Array
    sure: bool


def hadamard_matrix(head_dim: int) -> Array:
    """Orthonormal, block-diagonal for a head_dim that is no power of two: H[i, j] = (-1)^popcount(i & j)."""
    block = 1
    while head_dim % (2 * block) == 0:
        block *= 2
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return np.kron(np.eye(head_dim // block), np.array(signs) / np.sqrt(block))


def fp16(value: float, slack: float) -> tuple[float, bool]:
    """`value` rounded to fp16, and whether an error of `slack` can't change it."""
    low, high = np.float16(value - slack), np.float16(value + slack)
    return float(np.float16(value)), bool(low == high)


def nearest(row: Array, levels: Array) -> tuple[Array, bool]:
    """Every element's nearest level, and whether none lies close to the middle between two."""
    distance = np.abs(row[:, None] - levels)
    closest, second = np.sort(distance, axis=1)[:, :2].T
    sure = (second - closest > 2 * MARGIN * np.diff(levels).max()).all()
    return levels[distance.argmin(axis=1)], bool(sure)


def e5m5(value: float, slack: float) -> tuple[float, bool]:
    """A positive `value` rounded to fp16 and then to five of its ten mantissa bits, the middle of two upwards."""

    def rounded(x: float) -> float:
        half = float(np.float16(x))
        step = 2.0 ** (max(np.frexp(half)[1] - 1, -14) - 5)
        return min(np.floor(half / step + 0.5) * step, 64512.0)

    return rounded(value), rounded(value - slack) == rounded(value + slack)


def packed_affine(scale: float, offset: float, bits: int, slack: float) -> tuple[float, float, bool]:
    """Scale with five mantissa bits; offset in eighths of it, -4 to 3.875 from the middle of the grid.

    A grid whose middle is farther away than 3.875 scales is made wide enough.
    """
    middle = offset + scale * (2**bits - 1) / 2
    scale = max(scale, abs(middle) / 3.875)
    scale, sure = e5m5(scale, slack)
    eighths = middle / scale * 8 if scale else 0.0
    sure = sure and abs(eighths - np.floor(eighths) - 0.5) > 8 * MARGIN * (1 + abs(eighths))
    offset = (np.clip(np.round(eighths), -32, 31) / 8 - (2**bits - 1) / 2) * scale
    return scale, float(offset), bool(sure)


def stored_line(scale: float, offset: float, bits: int, slack: float, packed: bool) -> tuple[float, float, bool]:
    """Scale and offset as they are read back, and whether that is sure."""
    if packed:
        return packed_affine(scale, offset, bits, slack)
    (scale, scale_sure), (offset, offset_sure) = fp16(scale, slack), fp16(offset, slack)
    return scale, offset, scale_sure and offset_sure


def gaussian_affine(row: Array, bits: int, packed: bool) -> Coded:
    """Max's uniform quantiser for the row's mean and deviation, then the straight line through (code, value).

    A line that is stored packed is a coarse one: each element then goes to the nearest of its levels. In the end
    scale and offset are raised so that what is read has the row's own length along the row.
    """
    step = {2: 0.9957, 4: 0.3352}[bits] * row.std()
    boundaries = row.mean() + step * (np.arange(1, 2**bits) - 2 ** (bits - 1))
    codes = np.digitize(row, boundaries)
    clear = np.abs(row[:, None] - boundaries).min() > MARGIN * step
    slope, start = np.polyfit(codes, row, 1)
    slack = 3e-6 * (row.std() + abs(row.mean()))
    slope, start, line_sure = stored_line(slope, start, bits, slack, packed)
    read = start + slope * codes
    if packed:
        read, codes_sure = nearest(row, start + slope * np.arange(2**bits))
        codes, clear = np.round((read - start) / slope), clear and codes_sure
    gain = np.clip((row @ row) / (read @ row), 1.0, 2.0)
    slope, start, gained_sure = stored_line(slope * gain, start * gain, bits, slack, packed)
    return Coded(start + slope * codes, bool(clear and line_sure and gained_sure))


def clip_search(row: Array) -> Coded:
    """Four equally spaced levels from the clipped minimum to the clipped maximum; the best clip of nine."""
    low, high = row.min(), row.max()
    middle, half = (low + high) / 2, (high - low) / 2
    slack = 3e-7 * (abs(low) + abs(high))
    tried = []
    for factor in (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0):
        (step, step_sure), (start, start_sure) = (
            fp16(2 * half * factor / 3, slack),
            fp16(middle - half * factor, slack),
        )
        values, clear = nearest(row, start + step * np.arange(4))
        tried.append((((values - row) ** 2).sum(), values, step_sure and start_sure and clear))
    errors = sorted(error for error, _, _ in tried)
    _, values, sure = min(tried, key=lambda t: t[0])
    return Coded(values, bool(sure and errors[1] - errors[0] > 1e-5 * errors[0]))


def symmetric(row: Array, bits: int) -> Coded:
    """Integers -2^(b-1) .. 2^(b-1) - 1 times absmax / (2^(b-1) - 1)."""
    half = 2 ** (bits - 1)
    largest = np.abs(row).max()
    scale, scale_sure = fp16(largest / (half - 1), 1e-6 * largest / (half - 1))
    values, sure = nearest(row, scale * np.arange(-half, half))
    return Coded(values, scale_sure and sure)


def article_levels(row: Array) -> Coded:
    """S times -1, -0.33, 0.33 or 1, with S the absolute maximum of the core."""
    largest = np.abs(row).max()
    scale, scale_sure = fp16(largest, 1e-6 * largest)
    levels = scale * np.array([-1.0, -0.33, 0.33, 1.0])
    _, sure = nearest(row[row != 0], levels)  # zeros were taken out: it does not matter what they become
    return Coded(nearest(row, levels)[0], scale_sure and sure)


def e4m3(row: Array) -> Coded:
    """FP8 with a sign, four exponent bits (bias 7) and three mantissa bits; absmax lands on 448."""
    largest = np.abs(row).max()
    scale, scale_sure = fp16(largest / 448, 1e-6 * largest / 448)
    magnitudes = [
        (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # NaN
    ]
    levels = np.array(sorted({s * m for m in magnitudes for s in (-1, 1)}))
    values, sure = [], scale_sure
    for x in np.clip(row / scale, -448, 448):
        distance = np.sort(np.abs(levels - x))
        values.append(levels[np.abs(levels - x).argmin()])
        sure = sure and distance[1] - distance[0] > 1e-6 * abs(x)
    return Coded(np.array(values) * scale, bool(sure))


def in_groups(row: Array, group: int, code: Callable[[Array], Coded]) -> Coded:
    parts = [code(row[start : start + group]) for start in range(0, len(row), group)]
    return Coded(np.concatenate([p.values for p in parts]), all(p.sure for p in parts))


def take_out_largest(page: Array, fraction: float) -> tuple[Array, Array]:
    """The article's override: the core with its largest magnitudes zeroed, and those alone as fp16."""
    count = max(1, round(page.size * fraction))
    magnitudes = np.sort(np.abs(page).ravel())
    assert magnitudes[-count - 1] < magnitudes[-count], "which of two equal elements is taken is not defined"
    outlier = np.abs(page) >= magnitudes[-count]
    return np.where(outlier, 0, page), np.where(outlier, page.astype(np.float16).astype(np.float64), 0)


def coded_page(name: str, side: str, page: Array) -> tuple[Array, NDArray[np.bool_]]:
    """One head's page of 64 tokens as format `name` gives it back, in the space it came from.

    Args:
        name: a format of the catalog that codes its elements.
        side: "key" or "value".
        page: [64, head_dim]; a key's kept pair already set to zero.

    Returns:
        Values [64, head_dim], and bool [64, head_dim]: whether they are sure.
    """
    head_dim = page.shape[1]
    if name in LINES:
        bits = LINES[name][side == "value"]
        rotation = hadamard_matrix(head_dim)
        rows = [gaussian_affine(row @ rotation, bits, packed=bits == 2) for row in page]
        return np.stack([r.values @ rotation for r in rows]), _sure(rows, head_dim)
    if name == "kivi2" and side == "key":
        columns = [clip_search(column) for column in page.T]
        return np.stack([c.values for c in columns], axis=1), _sure(columns, len(page)).T
    if name == "article2":
        core, kept = take_out_largest(page, 0.01)
        rows = [in_groups(row, 64, article_levels) for row in core]
        return np.where(kept != 0, kept, np.stack([r.values for r in rows])), _sure(rows, head_dim)
    code: Callable[[Array], Coded] = {
        "kivi2": lambda row: in_groups(row, 64, clip_search),
        "int4": lambda row: in_groups(row, 64, lambda part: symmetric(part, 4)),
        "fp8": e4m3,
    }[name]
    rows = [code(row) for row in page]
    return np.stack([r.values for r in rows]), _sure(rows, head_dim)


def _sure(rows: list[Coded], length: int) -> NDArray[np.bool_]:
    return np.repeat([[row.sure] for row in rows], length, axis=1)
