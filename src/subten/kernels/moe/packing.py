"""Weights of experts in other forms: FP8 back to a wider type, and the down projection cut into slices."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subten.kernels.moe.inputs import SCALE_BLOCK, Experts, MoEWeights

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
EVERY = slice(None)
"""Of experts, all."""


def wide_gate_up(experts: Experts, which: slice, dtype: torch.dtype) -> Tensor:
    """The gate and up projections of some experts without scales, [experts, 2 * intermediate, hidden]."""
    weight, scale = experts.gate_up[which], experts.gate_up_scale
    wide = weight.to(dtype)
    if scale is not None:
        for half, of_half in zip(wide.chunk(2, 1), scale[which].chunk(2, 1), strict=True):
            _scale_in_place(half, of_half)
    return wide


def wide_down(experts: Experts, which: slice, dtype: torch.dtype) -> Tensor:
    """The down projections of some experts without scales and not cut, [experts, hidden, intermediate]."""
    weight, scale = experts.down[which], experts.down_scale
    if weight.ndim == 4:
        weight = weight.transpose(1, 2)
    wide = weight.to(dtype, memory_format=torch.contiguous_format).flatten(2)
    if scale is not None:
        _scale_in_place(wide, scale[which])
    return wide


def _scale_in_place(wide: Tensor, scale: Tensor) -> None:
    """Times a scale per row or block. A number of e4m3 is exact in every wider type, and the product is rounded once:
    nothing is kept in float32 on the way."""
    rows, columns = wide.shape[1:]
    if scale.ndim == 2:
        wide.mul_(scale[..., None])
    elif rows % SCALE_BLOCK == 0 and columns % SCALE_BLOCK == 0:
        blocks = wide.unflatten(1, (-1, SCALE_BLOCK)).unflatten(-1, (-1, SCALE_BLOCK))
        blocks.mul_(scale[:, :, None, :, None])
    else:
        wide.mul_(_spread(scale, rows, columns))


@torch.inference_mode()  # Weights that were made in that mode can't be changed outside of it.
def cut_down(weights: MoEWeights, width: int) -> MoEWeights:
    """Reorder the down projections in place, so that `width` columns of all rows lie one behind the other.

    One-launch decoding reads such a slice at a time. Beside the weights this needs memory for one expert. The tensors
    of `weights` are changed, and not what they say they are any more: use the result instead.
    """
    shared = weights.shared
    if shared is not None:
        shared = replace(shared, down=_cut(shared.down[None], width)[0])
    return replace(weights, down=_cut(weights.down, width), shared=shared)


def _cut(down: Tensor, width: int) -> Tensor:
    num_experts, hidden, intermediate = down.shape
    cut = down.view(num_experts, intermediate // width, hidden, width)
    for expert in range(num_experts):
        cut[expert].copy_(down[expert].view(hidden, -1, width).transpose(0, 1).clone())
    return cut


def quantised(weights: MoEWeights, *, blocks: bool) -> MoEWeights:
    """The experts in FP8 (e4m3), with a scale per output channel or per block of 128 x 128."""
    experts = _quantised(weights.experts, blocks)
    shared = weights.shared
    if shared is not None:
        one = _quantised(shared.expert, blocks)
        assert one.gate_up_scale is not None
        assert one.down_scale is not None
        shared = replace(
            shared,
            gate_up=one.gate_up[0],
            down=one.down[0],
            gate_up_scale=one.gate_up_scale[0],
            down_scale=one.down_scale[0],
        )
    return replace(
        weights,
        gate_up=experts.gate_up,
        down=experts.down,
        gate_up_scale=experts.gate_up_scale,
        down_scale=experts.down_scale,
        shared=shared,
    )


def _quantised(experts: Experts, blocks: bool) -> Experts:
    if not blocks:
        (gate_up, gate_up_scale), (down, down_scale) = map(_by_channel, (experts.gate_up, experts.down))
        return Experts(gate_up, down, gate_up_scale, down_scale)
    gate, up = (_by_block(half) for half in experts.gate_up.chunk(2, 1))
    down, down_scale = _by_block(experts.down)
    # torch.cat does not take FP8 everywhere.
    gate_up = torch.cat([gate[0].view(torch.uint8), up[0].view(torch.uint8)], 1).view(E4M3)
    return Experts(gate_up, down, torch.cat([gate[1], up[1]], 1), down_scale)


def _by_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(weight.float().abs().amax(-1))
    return _round(weight.float() / scale[..., None]), scale


def _by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = weight.shape
    row_blocks, column_blocks = -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
    padding = (0, column_blocks * SCALE_BLOCK - columns, 0, row_blocks * SCALE_BLOCK - rows)
    tiles = torch.nn.functional.pad(weight.float(), padding)
    tiles = tiles.view(*batch, row_blocks, SCALE_BLOCK, column_blocks, SCALE_BLOCK)
    scale = _scale(tiles.abs().amax((-3, -1)))
    return _round(weight.float() / _spread(scale, rows, columns)), scale


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    by_row = scale.repeat_interleave(SCALE_BLOCK, -2)[..., :rows, :]
    return by_row.repeat_interleave(SCALE_BLOCK, -1)[..., :columns]


def _scale(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / E4M3_MAX, 1.0).clamp_min(torch.finfo(torch.float32).tiny)


def _round(values: Tensor) -> Tensor:
    # What rounding of the scale brings above the largest number would become NaN.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
