"""FP8 weights (e4m3) with scales per output channel or per block, in the two layouts found in checkpoints.

- `X.weight_scale`, shape [out, 1] or [out]: one scale per output channel (compressed-tensors, FBGEMM). A single
  scale for the whole tensor, shape [] or [1], is the degenerate case.
- `X.weight_scale_inv`, shape [ceil(out / 128), ceil(in / 128)]: one scale per block (DeepSeek-V3, Qwen3). Despite
  the name, weights are *multiplied* by it. Blocks at the lower and right edge are partial.

Leading dimensions (stacked experts) are batch dimensions: weight [..., out, in], scale [..., out or blocks, ...].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FP8Scales = Literal["channel", "block"]
"""One scale per output channel, or per block of 128 x 128."""

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
DEFAULT_BLOCK = (128, 128)
# The smallest scale: below it the division by the scale would overflow.
_MIN_SCALE = torch.finfo(torch.float32).tiny


def has_nan(codes: Tensor) -> bool:
    """Whether e4m3 codes hold NaN, which are the bytes 7f and ff; there is no infinity. In two passes and without a
    second tensor: 7f is the largest byte with a sign, ff the largest one without."""
    return bool(codes.numel()) and (
        codes.view(torch.int8).amax().item() == 0x7F or codes.view(torch.uint8).amax().item() == 0xFF
    )


def channel_scale_fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether a scale of this shape is one per tensor, or one per output channel, of a weight of that shape."""
    return scale in ((), (1,), weight[:-1], (*weight[:-1], 1))


def block_scale_shape(weight: tuple[int, ...], block: tuple[int, int] = DEFAULT_BLOCK) -> tuple[int, ...]:
    """The shape of the block scales of a weight [..., out, in]."""
    *batch, rows, columns = weight
    return (*batch, -(-rows // block[0]), -(-columns // block[1]))


def dequantise_channels(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 values of e4m3 `weight` [..., out, in] with `scale` [], [1], [..., out] or [..., out, 1]."""
    values = weight.to(torch.float32)
    factors = scale.to(torch.float32)
    per_channel = factors.numel() > 1 and factors.ndim == weight.ndim - 1
    return values.mul_(factors.unsqueeze(-1) if per_channel else factors)


def dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] = DEFAULT_BLOCK) -> Tensor:
    """float32 values of e4m3 `weight` [..., out, in] with `scale` [..., ceil(out / rows), ceil(in / columns)]."""
    values = weight.to(torch.float32)
    return values.mul_(_spread(scale.to(torch.float32), weight.shape, block))


def quantise_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of `weight` [..., out, in] and float32 scales [..., out, 1], chosen so that the largest fits."""
    values = weight.to(torch.float32)
    scale = _scale_for(values.abs().amax(dim=-1, keepdim=True))
    return _round_to_e4m3(values / scale), scale


def quantise_blocks(weight: Tensor, block: tuple[int, int] = DEFAULT_BLOCK) -> tuple[Tensor, Tensor]:
    """e4m3 codes of `weight` [..., out, in] and float32 scales [..., ceil(out / rows), ceil(in / columns)]."""
    values = weight.to(torch.float32)
    *batch, rows, columns = values.shape
    *_, row_blocks, column_blocks = block_scale_shape(tuple(values.shape), block)
    padding = (0, column_blocks * block[1] - columns, 0, row_blocks * block[0] - rows)
    tiles = torch.nn.functional.pad(values, padding).view(*batch, row_blocks, block[0], column_blocks, block[1])
    scale = _scale_for(tiles.abs().amax(dim=(-3, -1)))
    return _round_to_e4m3(values / _spread(scale, values.shape, block)), scale


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


def _scale_for(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, (largest / E4M3_MAX).clamp_min(_MIN_SCALE), torch.ones_like(largest))


def _round_to_e4m3(values: Tensor) -> Tensor:
    # A value a hair above 448 after the division would become NaN: e4m3 has no infinity to saturate to.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
