"""What the Gluon decode kernel reads beside a cache: matrices in the order in which tensor cores take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subten.formats.coding import LayerCoding
from subten.formats.spec import PAGE_SIZE
from subten.kernels.rope import RopeTable

Q_STEPS = 127.0 * 128 + 63
"""Largest element of a query as an integer: an upper and a lower half of 8 bits each, the lower one in -64 .. 63."""
LARGEST_SCORE = 2.0**22 - 2.0**12
"""Largest sum of an integer query's products with codes that the kernel can read; less what rounding may add."""


@dataclass(frozen=True)
class GluonTables:
    """Of one or more layers of one model.

    An operand of the tensor core (m16n8k16) is stored as its fragments: [steps, tiles, 8, 4, 8], where the lane
    (r, j) of a warp finds its eight numbers of a tile of 16 x 16 side by side.

    Attributes:
        output_matrix: float16 [layers, num_kv_heads, head_dim * head_dim], `value.from_coded` transposed, as an
            operand, over `output_scale`; None where values are not transformed.
        output_scale: float32 [layers, num_kv_heads], its largest element: those of a Hadamard transform become 1.
        within: float16 [64 * head_dim], cos and then sin from a page's first token to each of its tokens, the
            amplitude of the rotation taken out, as operands of 32 columns with tokens in the order of slots. None
            without mean key.
    """

    output_matrix: Tensor | None
    output_scale: Tensor | None
    within: Tensor | None

    @classmethod
    def of(cls, codings: Sequence[LayerCoding], rope: RopeTable | None) -> GluonTables:
        """Of one coding per layer; `rope` is that of `CodingTables`."""
        output = [coding.value.from_coded.mT for coding in codings if coding.value is not None]
        scale = torch.stack(output).abs().amax((2, 3)) if output else None
        return cls(
            None if scale is None else _operand(torch.stack(output) / scale[..., None, None]),
            scale,
            None if rope is None else _within(rope),
        )

    def layer(self, part: slice) -> GluonTables:
        """Of some of the layers, as views."""
        return replace(
            self,
            output_matrix=None if self.output_matrix is None else self.output_matrix[part],
            output_scale=None if self.output_scale is None else self.output_scale[part],
        )


def _operand(matrix: Tensor) -> Tensor:
    """[..., m, k] in the order of fragments, flattened to float16 [..., m * k]."""
    tiles = matrix.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 8))
    first = tiles.ndim - 7
    # tile, row half, r, step, k half, j, k low -> step, tile, r, j, k half, row half, k low
    order = [first + axis for axis in (3, 0, 2, 5, 4, 1, 6)]
    fragments: Tensor = tiles.permute(*range(first), *order).flatten(first).half().contiguous()
    return fragments


def _within(rope: RopeTable) -> Tensor:
    angles = torch.zeros(PAGE_SIZE, 2 * rope.cos.shape[1], device=rope.cos.device)
    turns = torch.cat([rope.cos[:PAGE_SIZE], rope.sin[:PAGE_SIZE]], dim=1)
    angles[: len(turns)] = turns / rope.cos[0].repeat(2)
    slot = torch.arange(PAGE_SIZE, device=angles.device)
    fragments = angles[slot % 8 * 8 + slot // 8].view(4, 2, 8, -1, 4, 2, 2, 2)
    # tile, row half, r, chunk, j, step, k high, k low -> chunk, step, tile, r, j, k high, row half, k low: a lane
    # loads eight neighbours, and they are the registers of one instruction
    return fragments.permute(3, 5, 0, 2, 4, 6, 1, 7).flatten().half().contiguous()
