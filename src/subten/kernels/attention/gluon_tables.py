"""What the Gluon decode kernel reads beside a cache: matrices in the order in which tensor cores take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subten.formats.coding import LayerCoding
from subten.formats.spec import PAGE_SIZE
from subten.kernels.rope import RopeTable

Q_STEPS = 8127.0
"""Largest element of a query as an integer: 63 * 128 + 63, an upper and a lower half of 7 bits and a sign each."""


@dataclass(frozen=True)
class GluonTables:
    """Of one or more layers of one model.

    An operand of the tensor core (m16n8k16) is stored as its fragments: [steps, tiles, 8, 4, 8], where the lane (r, j)
    of a warp finds its eight numbers of a tile of 16 x 16 side by side.

    Attributes:
        query_bound: float32 [layers, num_kv_heads], the length that an element of a coded query has at most, per
            length of the query.
        query_sum: float32 [layers, num_kv_heads, n], of the query matrix' columns, n as in `CodingTables`.
        output_matrix: float16 [layers, num_kv_heads, head_dim * head_dim], `value.from_coded` transposed, as an
            operand, over `output_scale`; None where values are not transformed.
        output_scale: float32 [layers, num_kv_heads], its largest element: those of a Hadamard transform become 1.
        within: float16 [64 * head_dim], cos and then sin from a page's first token to each of its tokens, the
            amplitude of the rotation taken out, as an operand with tokens in the order of slots. None without mean key.
        starts: float16 [pages, head_dim], cos and then sin of the first tokens of pages.
    """

    query_bound: Tensor
    query_sum: Tensor
    output_matrix: Tensor | None
    output_scale: Tensor | None
    within: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(
        cls, query_matrix: Tensor, codings: Sequence[LayerCoding], rope: RopeTable | None, sinks: int
    ) -> GluonTables:
        """Of one coding per layer; `query_matrix` and `rope` are those of `CodingTables`."""
        matrix = query_matrix.float()
        output = [coding.value.from_coded.mT for coding in codings if coding.value is not None]
        scale = torch.stack(output).abs().amax((2, 3)) if output else None
        return cls(
            matrix.norm(dim=2).amax(-1),
            matrix.sum(-1),
            None if scale is None else _operand(torch.stack(output) / scale[..., None, None]),
            scale,
            None if rope is None else _within(rope),
            None if rope is None else _starts(rope, sinks),
        )

    def layer(self, part: slice) -> GluonTables:
        """Of some of the layers, as views."""
        return replace(
            self,
            query_bound=self.query_bound[part],
            query_sum=self.query_sum[part],
            output_matrix=None if self.output_matrix is None else self.output_matrix[part],
            output_scale=None if self.output_scale is None else self.output_scale[part],
        )


def _operand(matrix: Tensor) -> Tensor:
    """[..., m, k] in the order of fragments, flattened to float16 [..., m * k]."""
    tiles = matrix.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 8))
    first = tiles.ndim - 7
    # tile, row half, r, step, k half, j, k low -> step, tile, r, j, k half, row half, k low
    order = [first + axis for axis in (3, 0, 2, 5, 4, 1, 6)]
    return tiles.permute(*range(first), *order).flatten(first).half().contiguous()


def _within(rope: RopeTable) -> Tensor:
    angles = torch.zeros(PAGE_SIZE, 2 * rope.cos.shape[1], device=rope.cos.device)
    turns = torch.cat([rope.cos[:PAGE_SIZE], rope.sin[:PAGE_SIZE]], dim=1)
    angles[: len(turns)] = turns / rope.cos[0].repeat(2)
    slot = torch.arange(PAGE_SIZE, device=angles.device)
    return _operand(angles[slot % 8 * 8 + slot // 8])


def _starts(rope: RopeTable, sinks: int) -> Tensor:
    return torch.cat([rope.cos[sinks::PAGE_SIZE], rope.sin[sinks::PAGE_SIZE]], dim=1).half()
