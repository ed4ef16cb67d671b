"""Numbers to codes: scale, offset and rounding. Everything works on the last axis of a group of elements.

Scales and offsets are rounded to fp16 here, because that is what is stored; where they are known before
rounding, the codes are chosen for the stored values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subten.formats.spec import TensorFormat

# Step of the uniform quantiser with least squared error for a unit Gaussian, by bits: J. Max, "Quantizing for
# minimum distortion", IRE Trans. Inf. Theory 6 (1960), table II.
GAUSSIAN_STEP = {2: 0.9957, 4: 0.3352}
CLIP_FACTORS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
E4M3_MAX = 448.0
_F16_MAX = 65504.0
_F16_TINY = 2.0**-24


class Quantized(NamedTuple):
    """`codes` uint8 [..., n]; `scale` and `offset` fp16 [...] (`offset` None where the format has none)."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None


def quantize(x: Tensor, fmt: TensorFormat) -> Quantized:
    """Code the last axis of `x` with one scale (and offset) per row.

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
    return _clip_search(x, fmt.bits) if fmt.fit == "clip_search" else _least_squares(x, fmt.bits)


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor | None, fmt: TensorFormat) -> Tensor:
    """Inverse of `quantize`: float32, the shape of `codes`; `scale` and `offset` must broadcast to it."""
    if fmt.code == "e4m3":
        levels = codes.view(torch.float8_e4m3fn).float()
    elif fmt.code == "levels":
        levels = torch.tensor(fmt.level_values, device=codes.device)[codes.long()]
    else:
        levels = codes.float()
        if offset is None:
            levels = levels - (1 << (fmt.bits - 1))
    values = levels * scale.float()
    return values if offset is None else values + offset.float()


def to_f16(x: Tensor) -> Tensor:
    """Round to fp16; beyond its range saturate instead of becoming infinite. NaN stays NaN."""
    return x.clamp(-_F16_MAX, _F16_MAX).to(torch.float16)


def _scale16(x: Tensor) -> Tensor:
    # A scale of zero would turn 0 / 0 into NaN codes; the smallest fp16 codes an all-zero row as zeros.
    return to_f16(x.clamp_min(_F16_TINY))


def _to_codes(x: Tensor, bits: int) -> Tensor:
    # NaN has no integer value: code it as 0 here; the runner refuses NaN logits, it never relies on codes.
    return x.nan_to_num(0.0).round().clamp(0, (1 << bits) - 1).to(torch.uint8)


def _symmetric(x: Tensor, bits: int) -> Quantized:
    half = 1 << (bits - 1)
    scale = _scale16(x.abs().amax(-1) / (half - 1))
    return Quantized(_to_codes(x / scale.float()[..., None] + half, bits), scale, None)


def _levels(x: Tensor, level_values: tuple[float, ...]) -> Quantized:
    levels = torch.tensor(level_values, device=x.device)
    scale = _scale16(x.abs().amax(-1) / levels.max())
    edges = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize((x / scale.float()[..., None]).contiguous(), edges)
    return Quantized(codes.to(torch.uint8), scale, None)


def _e4m3(x: Tensor) -> Quantized:
    scale = _scale16(x.abs().amax(-1) / E4M3_MAX)
    scaled = (x / scale.float()[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantized(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale, None)


def _clip_search(x: Tensor, bits: int) -> Quantized:
    """Minimum and maximum drawn towards their middle by the factor that gives the least squared error."""
    low, high = x.amin(-1), x.amax(-1)
    middle, half_range = (low + high) / 2, (high - low) / 2
    best: Quantized | None = None
    best_error = torch.full_like(middle, torch.inf)
    for factor in CLIP_FACTORS:
        scale = _scale16(2 * half_range * factor / ((1 << bits) - 1))
        offset = to_f16(middle - half_range * factor)
        step, start = scale.float()[..., None], offset.float()[..., None]
        codes = _to_codes((x - start) / step, bits)
        error = (codes.float() * step + start - x).square().sum(-1)
        if best is None:
            best, best_error = Quantized(codes, scale, offset), error
            continue
        better = error < best_error
        assert best.offset is not None
        best = Quantized(
            torch.where(better[..., None], codes, best.codes),
            torch.where(better, scale, best.scale),
            torch.where(better, offset, best.offset),
        )
        best_error = torch.where(better, error, best_error)
    assert best is not None
    return best


def _least_squares(x: Tensor, bits: int) -> Quantized:
    """Codes from the optimal grid of a Gaussian with the row's mean and deviation, then a refit on the codes.

    After the Hadamard transform a row is close to Gaussian, so the grid needs no search; the refit by linear
    regression of the row on its codes removes the bias that is left (a "norm correction").

    Elements saturate at a quarter of fp16's range: the fitted line starts at up to three times the largest
    element, and an offset that saturated beside a scale that does not would shift the whole row.
    """
    x = x.clamp(-_F16_MAX / 4, _F16_MAX / 4)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    step = centred.square().mean(-1, keepdim=True).sqrt() * GAUSSIAN_STEP[bits]
    codes = _to_codes(centred / step.clamp_min(1e-12) + ((1 << bits) - 1) / 2, bits)
    levels = codes.float()
    code_mean = levels.mean(-1, keepdim=True)
    deviation = levels - code_mean
    variance = deviation.square().sum(-1, keepdim=True)
    slope = (deviation * centred).sum(-1, keepdim=True) / variance.clamp_min(1e-12)
    scale, offset = slope, mean - slope * code_mean
    return Quantized(codes, to_f16(scale)[..., 0], to_f16(offset)[..., 0])
