"""How the linear kernels for few tokens share their work: shapes to tiles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights

LANES = 4
"""Warps of a program; each takes a quarter of the columns of its rows, and the four sums are added up in pairs. A
tile of the tensor core has 16 rows at least: with warps below each other, 2048 output channels would be 32 programs
instead of 128, and leave three quarters of a GPU idle."""

_STEP = 64
"""Columns of a lane in one step: those of four lanes are two lines of the L2 of FP8 weights, or four."""
_MOST_COLUMNS = 32
"""Tokens of a program; of more, several programs read the same weights at the same time."""
_ACCUMULATORS = 1024
"""Elements of a warp's sums: 32 registers of a thread."""
_ROWS = (64, 32, 16)
_STAGE_BYTES = 65536
"""Of weights and tokens that a program holds, so that three run on a multiprocessor; more where steps are large."""
_HALF = 113 << 10
"""Of a multiprocessor's shared memory."""
_LEAST_STAGES, _MOST_STAGES = 3, 8

_LINE = 128
"""Bytes that a lane of the Gluon kernel takes of a row in one step: what one swizzle of the copy engine spans."""
_MOST_STEPS = 32
"""Of the Gluon kernel, whose steps are written out one behind the other."""
_RING_BYTES = 104 << 10
"""Of shared memory for what a program of the Gluon kernel has on its way: two fit on a multiprocessor."""


@dataclass(frozen=True)
class LinearShape:
    """What of a layer the kernel is compiled for, beside the types of its tensors.

    Attributes:
        inputs: channels that are read.
        outputs: channels that are written.
        itemsize: bytes of a weight.
    """

    inputs: int
    outputs: int
    itemsize: int


@dataclass(frozen=True)
class LinearTuning:
    """How one program does its work. A token's bits depend on `lanes` and `step` alone, which no number of tokens
    changes: a sum runs over the columns in one order, whatever tile it is part of.

    Attributes:
        lanes: warps, a power of two.
        step: columns of a lane in one step.
        rows: output channels of a program.
        columns: tokens that a tile has room for, a power of two.
        stages: steps in flight, the one at work included.
        ahead: steps of tokens that are loaded before they are needed, where that is not the compiler's affair.
    """

    lanes: int
    step: int
    rows: int
    columns: int
    stages: int
    ahead: int = 0

    @property
    def lane_bits(self) -> int:
        """Of the number of a lane."""
        return self.lanes.bit_length() - 1


def tune_linear(shape: LinearShape, tokens: int, num_sms: int) -> LinearTuning:
    """Tiles for so many tokens on a GPU of `num_sms` multiprocessors.

    Each program reads and converts its tokens once more: 8 of them are as many bytes as 16 rows in FP8, and nearly as
    much work. So rows are as many as leave two programs for every multiprocessor, or one where more tokens make more
    of that work. Examples on 132 multiprocessors: at 8 tokens 2048 channels are 128 programs of 16 rows, 5120 are 320
    of 16, and a vocabulary of 151,936 is 2374 of 64; at 32 tokens 5120 are 160 of 32.
    """
    columns = max(8, min(_MOST_COLUMNS, 1 << (tokens - 1).bit_length()))

    def held(rows: int) -> int:
        return LANES * _STEP * (rows * shape.itemsize + 2 * columns)

    allowed = [r for r in _ROWS if r * columns <= _ACCUMULATORS and _LEAST_STAGES * held(r) <= _HALF]
    programs = num_sms if columns > 8 else 2 * num_sms
    rows = next((r for r in allowed if -(-shape.outputs // r) >= programs), allowed[-1])
    stages = max(_LEAST_STAGES, min(_MOST_STAGES, _STAGE_BYTES // held(rows)))
    return LinearTuning(LANES, _STEP, rows, columns, stages)


def gluon_refusal(x: Tensor, weights: LinearWeights) -> str | None:
    """Why the Gluon kernel does not take such a layer and tokens in such memory, or None."""
    weight = weights.weight
    span = LANES * _LINE // weight.itemsize
    if weight.shape[1] % span or weight.shape[1] > _MOST_STEPS * span:
        return f"it takes up to {_MOST_STEPS} times {span} input channels, not {weight.shape[1]}"
    if weight.data_ptr() % 16 or not weight.is_contiguous():
        return "it takes contiguous weights that begin at a multiple of 16 bytes"
    if x.data_ptr() % 16 or x.stride(0) * x.itemsize % 16:
        return "it takes tokens that begin at multiples of 16 bytes"
    return None


def tune_gluon_linear(shape: LinearShape, tokens: int, num_sms: int) -> LinearTuning:
    """As `tune_linear`, for the Gluon kernel, whose bits depend on its own lanes and steps.

    What was fastest on an H200, see docs/kernels/linear.md: rows as many as leave work for half of the
    multiprocessors, which is enough for all that memory gives, since a program's tokens are as much work as some of
    its rows; and as much of its weights on the way as leaves room for all programs at once. Examples on 132
    multiprocessors, up to 8 tokens: 2048 outputs are 64 programs of 32 rows, 5120 are 80 of 64, and a vocabulary of
    151,936 is 2374 of 64.
    """
    step = _LINE // shape.itemsize
    many = shape.outputs >= 64 * 4 * num_sms
    columns = max(8, min(_MOST_COLUMNS if many else 8, 1 << (tokens - 1).bit_length()))
    rows = 16 if 32 * num_sms > 2 * shape.outputs + 128 else 64 if many and columns < 32 else 32
    stages = min(shape.inputs // (LANES * step), _RING_BYTES // (LANES * (rows * _LINE + 2 * columns * step)))
    return LinearTuning(LANES, step, rows, columns, max(2, stages), max(1, 256 // step))
