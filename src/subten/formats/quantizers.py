"""Numbers to codes, each row by itself and each element to its nearest level. Works on the last axis.

Scales and offsets are rounded here to what is stored (affine.py); where they are known before rounding, the codes
are chosen for the stored values. Rounding that weighs errors is in shaping.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subten.formats.affine import F16_MAX, F16_TINY, load_affine, store_affine, store_scale, unbiasing
from subten.formats.spec import TensorFormat

# Step of the uniform quantiser with least squared error for a unit Gaussian, by bits: J. Max, "Quantizing for
# minimum distortion", IRE Trans. Inf. Theory 6 (1960), table II.
GAUSSIAN_STEP = {2: 0.9957, 4: 0.3352}
CLIP_FACTORS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
E4M3_MAX = 448.0


class Quantized(NamedTuple):
    """`codes` uint8 [..., n], and the `grid` they lie on as it is stored, [..., parts] (see affine.py)."""

    codes: Tensor
    grid: Tensor


def quantize(x: Tensor, fmt: TensorFormat) -> Quantized:
    """Code the last axis of `x` with one grid per row.

    Args:
        x: float32 [..., n].
        fmt: what to code it as; its `code` must not be "wide".
    """
    if fmt.code == "e4m3":
        return _e4m3(x)
    if fmt.code == "levels":
        return _levels(x, fmt.level_values)
    if not fmt.offset:
        return _symmetric(x, fmt.bits)
    return _clip_search(x, fmt) if fmt.fit == "clip_search" else _least_squares(x, fmt)


def dequantize(codes: Tensor, grid: Tensor, fmt: TensorFormat) -> Tensor:
    """Inverse of `quantize`: float32, the shape of `codes` [..., n]; `grid` [..., n or 1, parts]."""
    if fmt.offset:
        scale, offset = load_affine(grid, fmt)
        return codes.float() * scale + offset
    scale = grid[..., 0].float()
    if fmt.code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float() * scale
    if fmt.code == "levels":
        return torch.tensor(fmt.level_values, device=codes.device)[codes.long()] * scale
    return (codes.float() - (1 << (fmt.bits - 1))) * scale


def _to_codes(x: Tensor, bits: int) -> Tensor:
    # NaN has no integer value: code it as 0 here; the runner refuses NaN logits, it never relies on codes.
    return x.nan_to_num(0.0).round().clamp(0, (1 << bits) - 1).to(torch.uint8)


def _symmetric(x: Tensor, bits: int) -> Quantized:
    half = 1 << (bits - 1)
    scale = store_scale(x.abs().amax(-1, keepdim=True) / (half - 1))
    return Quantized(_to_codes(x / scale.float() + half, bits), scale)


def _levels(x: Tensor, level_values: tuple[float, ...]) -> Quantized:
    levels = torch.tensor(level_values, device=x.device)
    scale = store_scale(x.abs().amax(-1, keepdim=True) / levels.max())
    edges = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize((x / scale.float()).contiguous(), edges)
    return Quantized(codes.to(torch.uint8), scale)


def _e4m3(x: Tensor) -> Quantized:
    scale = store_scale(x.abs().amax(-1, keepdim=True) / E4M3_MAX)
    scaled = (x / scale.float()).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantized(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale)


def _clip_search(x: Tensor, fmt: TensorFormat) -> Quantized:
    """Minimum and maximum drawn towards their middle by the factor that gives the least squared error."""
    low, high = x.amin(-1), x.amax(-1)
    middle, half_range = (low + high) / 2, (high - low) / 2
    best: Quantized | None = None
    best_error = torch.full_like(middle, torch.inf)
    for factor in CLIP_FACTORS:
        step = (2 * half_range * factor / ((1 << fmt.bits) - 1)).clamp_min(F16_TINY)
        grid = store_affine(step, middle - half_range * factor, fmt)
        scale, offset = (t[..., None] for t in load_affine(grid, fmt))
        codes = _to_codes((x - offset) / scale, fmt.bits)
        error = (codes.float() * scale + offset - x).square().sum(-1)
        if best is None:
            best, best_error = Quantized(codes, grid), error
            continue
        better = error < best_error
        best = Quantized(
            torch.where(better[..., None], codes, best.codes), torch.where(better[..., None], grid, best.grid)
        )
        best_error = torch.where(better, error, best_error)
    assert best is not None
    return best


def _least_squares(x: Tensor, fmt: TensorFormat) -> Quantized:
    """Codes from the optimal grid of a Gaussian with the row's mean and deviation, then a refit on the codes.

    After the Hadamard transform a row is close to Gaussian, so the grid needs no search; the refit by linear
    regression of the row on its codes fits it to the codes. Where the grid is stored with few bits, the codes are
    chosen once more for the grid as it will be read. In the end the grid is unbiased.
    """
    x = saturated(x)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    step = centred.square().mean(-1, keepdim=True).sqrt() * GAUSSIAN_STEP[fmt.bits]
    codes = _to_codes(centred / step.clamp_min(1e-12) + ((1 << fmt.bits) - 1) / 2, fmt.bits)
    levels = codes.float()
    code_mean = levels.mean(-1, keepdim=True)
    deviation = levels - code_mean
    variance = deviation.square().sum(-1, keepdim=True)
    scale = (deviation * centred).sum(-1, keepdim=True) / variance.clamp_min(1e-12)
    grid = store_affine(scale[..., 0], (mean - scale * code_mean)[..., 0], fmt)
    scale, offset = (t[..., None] for t in load_affine(grid, fmt))
    if fmt.affine == "packed":
        codes = _to_codes((x - offset) / scale.clamp_min(1e-12), fmt.bits)
    read = codes.float() * scale + offset
    gain = unbiasing(x.square().sum(-1, keepdim=True), (read * x).sum(-1, keepdim=True))
    return Quantized(codes, store_affine((scale * gain)[..., 0], (offset * gain)[..., 0], fmt))


def saturated(x: Tensor) -> Tensor:
    """Elements within a quarter of fp16's range: a fitted line starts at up to three times the largest element,
    and an offset that saturated beside a scale that does not would shift the whole row."""
    return x.clamp(-F16_MAX / 4, F16_MAX / 4)
