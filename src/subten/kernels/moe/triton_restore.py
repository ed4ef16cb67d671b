"""Experts as grouped GEMMs take them, in one pass: FP8 back in 16 bit, cut down projections put together."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.kernels.moe.inputs import SCALE_BLOCK

ROWS_OF_A_TILE = 64
WARPS = 4


def restore(weight: Tensor, scale: Tensor | None, dtype: torch.dtype, halves: int) -> Tensor:
    """The same as `packing.wide_gate_up` and `packing.wide_down`, to the bit.

    Args:
        weight: [E, rows, columns], or cut [E, slices, rows, columns / slices], contiguous.
        scale: see `Experts`; None of weights in 16 bit.
        dtype: of the result [E, rows, columns], bf16 or fp16.
        halves: of the rows, each with blocks of scales of its own: 2 of gate and up.
    """
    slices = weight.shape[1] if weight.ndim == 4 else 1
    (num_experts, *_, rows, width), columns = weight.shape, slices * weight.shape[-1]
    out = torch.empty(num_experts, rows, columns, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(columns, SCALE_BLOCK), triton.cdiv(rows, ROWS_OF_A_TILE), num_experts)
    sizes = {"ROWS": rows, "COLUMNS": columns, "HALF": rows // halves, "WIDTH": width}
    tile = {"TILE": ROWS_OF_A_TILE, "BLOCK": SCALE_BLOCK}
    by_block = scale is not None and scale.ndim == 3
    restore_kernel[grid](weight, scale, out, **sizes, **tile, BY_BLOCK=by_block, num_warps=WARPS)
    return out


@triton.jit
def restore_kernel(
    codes,
    scales,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):
    """Grid: (blocks of columns, tiles of rows, experts). A tile of rows has one scale in each of them."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (row < ROWS)[:, None] & (column < COLUMNS)
    at = column // WIDTH * (ROWS * WIDTH) + row[:, None] * WIDTH + column % WIDTH
    weights = tl.load(codes + expert * (ROWS * COLUMNS) + at, mask=here, other=0.0)
    restored = weights.to(tl.float32)
    if scales is not None:
        if BY_BLOCK:
            row_blocks: tl.constexpr = (HALF + BLOCK - 1) // BLOCK
            column_blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
            block = row // HALF * row_blocks + row % HALF // BLOCK
            of_row = expert * (ROWS // HALF * row_blocks * column_blocks) + block * column_blocks + tl.program_id(0)
        else:
            of_row = expert * ROWS + row
        restored *= tl.load(scales + of_row, mask=row < ROWS, other=0.0)[:, None]
    at_row = out + expert * (ROWS * COLUMNS) + row[:, None] * COLUMNS
    tl.store(at_row + column, restored.to(out.dtype.element_ty), mask=here)
