"""How the two numbers of a grid, scale and offset, are stored beside the codes.

`fp16`: two fp16 numbers. `packed`: both in one int16 word, for grids of few bits, whose codes make up for what is
lost. Bits 15..6 are the upper ten of the scale's fp16 (five of exponent, five of mantissa; scales have no sign),
bits 5..0 are the offset in eighths of the scale, as an excess-32 number, measured from the middle of the grid. Two
words become two scales with one AND and one shift, and two offsets with one AND-OR (a fp16 of exponent 2^10 has
an integer in its low bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from subten.formats.spec import TensorFormat

F16_MAX = 65504.0
F16_TINY = 2.0**-24
_LARGEST_GAIN = 2.0
"""A row of which the codes explain less than half is one that no factor makes right."""
OFFSET_BITS = 6
OFFSETS_PER_STEP = 8
_EXCESS = 1 << (OFFSET_BITS - 1)
_DROPPED = 5
"""Low mantissa bits of the fp16 scale that a packed word has no room for."""
_PACKED_MAX = float.fromhex("0x1.f8p15")
_LARGEST_OFFSET = _EXCESS / OFFSETS_PER_STEP


def to_f16(x: Tensor) -> Tensor:
    """Round to fp16; beyond its range saturate instead of becoming infinite. NaN stays NaN."""
    return x.clamp(-F16_MAX, F16_MAX).to(torch.float16)


def store_scale(scale: Tensor) -> Tensor:
    """A scale without an offset, at least the smallest fp16: zero would turn 0 / 0 into NaN codes."""
    return to_f16(scale.clamp_min(F16_TINY))


def unbiasing(energy: Tensor, explained: Tensor) -> Tensor:
    """The factor on scale and offset that makes what is read an unbiased estimate of what was coded.

    Least squares gives the read vector r of y the least error, and <r, y> = <r, r> below <y, y>: every score with a
    coded key and every sum of coded values shrinks by the same share, 12% at 2 bits. Errors of different tokens
    cancel in a softmax over many of them; a shrinkage does not. Divided by it, r errs a little more and is right on
    average. Measured, this halves what 2 bits cost (docs/formats/quality.md). TurboQuant (Zandieh et al.,
    arXiv:2504.19874) makes the same case for inner products.

    Args:
        energy: <y, y>, in the metric that counts.
        explained: <r, y>, in the same metric.
    """
    return (energy / explained.clamp_min(F16_TINY)).clamp(1.0, _LARGEST_GAIN)


def parts(fmt: TensorFormat) -> tuple[torch.dtype, int]:
    """Element type and count of what is stored per grid."""
    if fmt.affine == "packed":
        return torch.int16, 1
    return torch.float16, 2 if fmt.offset else 1


def store_affine(scale: Tensor, offset: Tensor, fmt: TensorFormat) -> Tensor:
    """Float32 [...] scale (above 0) and offset to what is stored, [..., parts]."""
    if fmt.affine == "fp16":
        return torch.stack([to_f16(scale), to_f16(offset)], dim=-1)
    middle = ((1 << fmt.bits) - 1) / 2
    # A row far from zero for its width is coded with a wider grid: its offset must be within reach.
    centre = offset + middle * scale
    scale = torch.maximum(scale, centre.abs() / (_LARGEST_OFFSET - 1 / OFFSETS_PER_STEP))
    bits = to_f16(scale.clamp(0, _PACKED_MAX)).view(torch.int16).to(torch.int32) & 0x7FFF
    # Some NaNs have all mantissa bits set: rounded up, they must not run over into a scale of zero.
    bits = ((bits + (1 << (_DROPPED - 1))) >> _DROPPED).clamp_max(0x7FFF >> _DROPPED)
    rounded = (bits << _DROPPED).to(torch.int16).view(torch.float16).float()
    eighths = (centre / rounded * OFFSETS_PER_STEP).round().clamp(-_EXCESS, _EXCESS - 1)
    # NaN must stay visible: as the NaN of the scale.
    word = (bits << OFFSET_BITS) | (eighths.nan_to_num(0.0).to(torch.int32) + _EXCESS)
    return torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)[..., None]


def load_affine(stored: Tensor, fmt: TensorFormat) -> tuple[Tensor, Tensor]:
    """Inverse of `store_affine`: float32 scale and offset [...]."""
    if fmt.affine == "fp16":
        values = stored.float()
        return values[..., 0], values[..., 1]
    word = stored[..., 0].to(torch.int32) & 0xFFFF
    scale = ((word >> OFFSET_BITS) << _DROPPED).to(torch.int16).view(torch.float16).float()
    eighths = (word & ((1 << OFFSET_BITS) - 1)) - _EXCESS
    middle = ((1 << fmt.bits) - 1) / 2
    return scale, (eighths.float() / OFFSETS_PER_STEP - middle) * scale
