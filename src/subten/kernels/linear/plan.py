"""How the linear kernels for few tokens share their work: shapes to tiles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights

LANES = 4
"""Warps of a program; each takes a quarter of the columns of its rows, and the four sums are added up in pairs. A
tile of the tensor core has 16 rows at least: with warps below each other, 2048 output channels would be 32 programs
instead of 128, and leave three quarters of a GPU idle. Of few outputs programs of the Gluon kernel have more."""

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
_ROOM_OF_ONE, _ROOM_OF_TWO, _ROOM_OF_MANY = 144 << 10, 104 << 10, 80 << 10
"""Shared memory for what a program of the Gluon kernel has on its way, by programs that share a multiprocessor."""
_FEW_OUTPUTS = 640
"""Of a layer with so few programs of 16 rows (40) that it takes as long as one of them, whatever memory gives."""
_STEPS_OF_FEW, _WIDEST_STEP = 4, 1024
"""Into how many steps such a program divides its columns, if they are no more than so many each: those of 16 lanes in
16 bit, or of 8 in FP8, which takes more registers."""
_ROOM_OF_FEW = 192 << 10
"""As the rooms above, of such a program: four steps of 16 lanes in 16 bit. That no other has room beside it costs
nothing where most of a GPU is idle."""
_MOST_HELD = 4
"""Steps of which a thread of 16 warps has registers for tokens and norm: it has 128 in all."""
_MOST_LOADED = 2
"""Tokens that the threads of the Gluon kernel load themselves."""


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
    """How one program does its work. A token's bits depend on `lanes` and `step` alone, which follow from the layer's
    shape and from nothing else: a sum runs over the columns in one order, whatever tile it is part of.

    Attributes:
        lanes: warps, a power of two.
        step: columns of a lane in one step.
        rows: output channels of a program.
        columns: tokens that a tile has room for, a power of two.
        stages: steps in flight, the one at work included.
        ahead: steps of a norm's weight, and of tokens that are not copied, that are loaded before they are needed;
            in the Triton kernel that is the compiler's affair.
        copied: whether tokens come by the copy engine, in the Gluon kernel.
    """

    lanes: int
    step: int
    rows: int
    columns: int
    stages: int
    ahead: int = 0
    copied: bool = False

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

    What was fastest on an H200 (docs/kernels/linear.md): rows enough that a program's tokens are less work than its
    weights, few enough that half of the multiprocessors have a program, which is enough for all that memory gives.
    Layers of few outputs have 16 rows to a program, and as many warps as leave four steps in a row.
    Examples on 132 multiprocessors, up to 8 tokens: 1024 outputs are 64 programs of 16 rows, 2048 are 64 of 32, 5120
    are 160, and a vocabulary of 151,936 is 2374 of 64; from 9 tokens on 5120 are 80 of 64 for each 16 of them.
    """
    few, lanes, step = shape.outputs <= _FEW_OUTPUTS, _gluon_lanes(shape), _LINE // shape.itemsize
    of_a_multiprocessor = 0 if few else shape.outputs // num_sms
    vocabulary, many = of_a_multiprocessor >= 256, tokens > 8 and of_a_multiprocessor >= 31
    columns = 16 if many else 8
    rows = 64 if vocabulary or many else 32 if of_a_multiprocessor >= 15 else 16
    copied = tokens > _MOST_LOADED
    programs = -(-shape.outputs // rows) * -(-tokens // columns)
    shared = _ROOM_OF_MANY if vocabulary else _ROOM_OF_TWO if programs > num_sms else _ROOM_OF_ONE
    stages = (_ROOM_OF_FEW if few else shared) // (lanes * (rows * _LINE + 2 * columns * step * copied))
    steps = shape.inputs // (lanes * step)
    ahead = 512 // step
    if lanes == 16:
        # While one is at work, the next one comes.
        ahead = steps if steps <= _MOST_HELD else _MOST_HELD - 1
    return LinearTuning(lanes, step, rows, columns, min(steps, max(2, stages)), ahead, copied)


def _gluon_lanes(shape: LinearShape) -> int:
    """Warps of a program of the Gluon kernel. They decide in which order a sum is added up, so neither the number of
    tokens nor the GPU may have a part in them."""
    lanes, span = LANES, LANES * _LINE // shape.itemsize
    if shape.outputs <= _FEW_OUTPUTS:
        while span < _WIDEST_STEP and shape.inputs > _STEPS_OF_FEW * span and shape.inputs % (2 * span) == 0:
            lanes, span = 2 * lanes, 2 * span
    return lanes
