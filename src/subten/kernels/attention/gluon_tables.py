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


_PAIRS_AT_ONCE = 8
"""Rotary pairs in one step of the tensor core: 16 columns, cos and sin."""


@dataclass(frozen=True)
class GluonTables:
    """Of one or more layers of one model.

    An operand of the tensor core (m16n8k16) is stored as its fragments: [steps, tiles, 8, 4, 8], where the lane
    (r, j) of a warp finds its eight numbers of a tile of 16 x 16 side by side.

    Attributes:
        output_matrix: float16 [layers, num_kv_heads, head_dim * head_dim], `value.from_coded` transposed, as an
            operand, over `output_scale`; None where values are not transformed.
        output_scale: float32 [layers, num_kv_heads], its largest element: those of a Hadamard transform become 1.
        mean_pairs: int32 [layers, num_kv_heads, pairs], the rotary pairs in which a head's mean key is not zero,
            filled up to a multiple of eight. None without mean key.
        mean: float32 [layers, num_kv_heads, 2, pairs], the mean key's two elements of each.
        within: float16 [layers, num_kv_heads, 64 * 2 * pairs], cos and sin from a page's first token to each of its
            tokens, the amplitude of the rotation taken out, as an operand with tokens in the order of slots and of
            every eight pairs first the cos and then the sin.
        starts: float32 [pages, head_dim / 2, 2], cos and sin of the first tokens of pages.
    """

    output_matrix: Tensor | None
    output_scale: Tensor | None
    mean_pairs: Tensor | None
    mean: Tensor | None
    within: Tensor | None
    starts: Tensor | None

    @property
    def num_mean_pairs(self) -> int:
        """Rotary pairs in which mean keys are not zero, as the kernel counts them."""
        return 0 if self.mean_pairs is None else self.mean_pairs.shape[-1]

    @classmethod
    def of(
        cls, codings: Sequence[LayerCoding], mean: Tensor | None, rope: RopeTable | None, sinks: int
    ) -> GluonTables:
        """Of one coding per layer; `mean` and `rope` are those of `CodingTables`. Pages begin behind the sinks."""
        output = [coding.value.from_coded.mT for coding in codings if coding.value is not None]
        scale = torch.stack(output).abs().amax((2, 3)) if output else None
        matrix = None if scale is None else _operand(torch.stack(output) / scale[..., None, None])
        if mean is None or rope is None:
            return cls(matrix, scale, None, None, None, None)
        mean_pairs, of_pairs, within = _mean_key(mean, rope)
        return cls(matrix, scale, mean_pairs, of_pairs, within, _starts(rope, sinks))

    def layer(self, part: slice) -> GluonTables:
        """Of some of the layers, as views."""
        return replace(
            self,
            output_matrix=None if self.output_matrix is None else self.output_matrix[part],
            output_scale=None if self.output_scale is None else self.output_scale[part],
            mean_pairs=None if self.mean_pairs is None else self.mean_pairs[part],
            mean=None if self.mean is None else self.mean[part],
            within=None if self.within is None else self.within[part],
        )


def _operand(matrix: Tensor) -> Tensor:
    """[..., m, k] in the order of fragments, flattened to float16 [..., m * k]."""
    tiles = matrix.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 8))
    first = tiles.ndim - 7
    # tile, row half, r, step, k half, j, k low -> step, tile, r, j, k half, row half, k low
    order = [first + axis for axis in (3, 0, 2, 5, 4, 1, 6)]
    fragments: Tensor = tiles.permute(*range(first), *order).flatten(first).half().contiguous()
    return fragments


def _mean_key(mean: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor, Tensor]:
    pairs = mean.unflatten(-1, (2, -1))
    live = (pairs != 0).any(-2)
    count = max(1, int(live.sum(-1).max()))
    # The sort is stable: pairs that are not zero, in their order, and then as many others as it takes.
    index = live.int().argsort(dim=-1, descending=True, stable=True)[
        ..., : -(-count // _PAIRS_AT_ONCE) * _PAIRS_AT_ONCE
    ]
    turns = torch.zeros(PAGE_SIZE, 2, rope.cos.shape[1], device=mean.device)
    length = min(PAGE_SIZE, len(rope.cos))
    turns[:length] = torch.stack([rope.cos[:length], rope.sin[:length]], dim=1) / rope.cos[0]
    slot = torch.arange(PAGE_SIZE, device=mean.device)
    of_pairs = turns[slot % 8 * 8 + slot // 8][..., index]  # [slot, cos or sin, layer, head, pair]
    columns = of_pairs.unflatten(-1, (-1, _PAIRS_AT_ONCE)).permute(2, 3, 0, 4, 1, 5).flatten(3)
    return index.int(), pairs.take_along_dim(index.unsqueeze(-2), -1).contiguous(), _operand(columns)


def _starts(rope: RopeTable, sinks: int) -> Tensor:
    return torch.stack([rope.cos[sinks::PAGE_SIZE], rope.sin[sinks::PAGE_SIZE]], dim=-1).float().contiguous()
