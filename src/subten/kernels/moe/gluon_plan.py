"""What the Gluon mixture-of-experts kernel is told beyond its tensors, and how a launch is split."""

from __future__ import annotations

from dataclasses import dataclass

from subten.kernels.moe.inputs import SCALE_BLOCK
from subten.kernels.moe.plan import LaunchPlan, MoEShape, Sums, choose_finishers, most_items, power_of_two

SLICE = 64
"""Neurons that go through the kernel together."""
LINE = 128
"""Bytes of a row of a tile of gate or up: what one swizzle of the copy engine spans."""
MOST_HIDDEN = 7168
"""Eight tokens as wide, and two stages, are what fits in shared memory, with up to 512 experts."""
WARPS = 8
"""That multiply: four for each of a pair of tiles of gate and up, with 16 of the neurons."""
REGISTERS = 65536 // (32 * (WARPS + 4)) // 8 * 8
"""Of a thread when a program starts. The warp that fetches is counted as four, keeps few, and the others get them."""
_SHARED_MEMORY = 227 << 10
_BESIDE = 1 << 10
"""Barriers, smaller reductions, and what the driver has of a multiprocessor."""
LONGEST_RUN = 15
"""With 16, there are up to nine blocks of scales, and so room for 16."""
_USUAL_RUN = 11
"""Hardly any program has longer ones."""
_STAGES_OF_ONE_TILE, _STAGES_OF_MANY = 4, 3
"""More are no faster, and slower where programs next to each other wait for the same weights."""
FINISH_BYTES = 32 << 10
"""Of sums that one program turns into output in one round trip to the L2: 16 numbers for each of its threads."""


@dataclass(frozen=True)
class GluonMoETuning:
    """How a program, which has a multiprocessor to itself, does its work.

    Attributes:
        slice: neurons of an expert that go through the kernel together: their rows of gate and up, their columns of
            down. All that the bits of a result depend on.
        columns: tokens of an expert that are multiplied together.
        run: slices at most whose outputs are added up before they leave the program.
        stages: pairs of tiles in shared memory, those at work included.
    """

    slice: int
    columns: int
    run: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        """Of two tiles: a line each of every row of gate and up."""
        return 4 * self.slice * LINE


GluonMoEPlan = LaunchPlan[GluonMoETuning]


def shape_refusal(hidden: int, intermediate: int, shared: int = 0) -> str | None:
    """Why the kernel does not serve experts of these sizes, or None."""
    if hidden % 512 or not 1024 <= hidden <= MOST_HIDDEN or intermediate % SLICE or shared % SLICE:
        return (
            f"it takes a hidden size from 1024 to {MOST_HIDDEN} that is a multiple of 512 and experts of a multiple "
            f"of {SLICE}, not {hidden} and {intermediate}" + f" with a shared one of {shared}" * bool(shared)
        )
    return None


def row_of_scales(shape: MoEShape) -> int:
    """Places in shared memory for the scales of a block of neurons, one for each block of columns."""
    return int(1 << (shape.hidden_blocks - 1).bit_length())


def blocks_of_run(run: int) -> int:
    """Places for blocks of neurons that so many slices can touch: the first may be the second of its block."""
    return int(1 << (run // (SCALE_BLOCK // SLICE)).bit_length())


def longest_run(shape: MoEShape, columns: int, stages: int) -> int:
    """Slices that there is room for in shared memory between gate and up and down; 0 where there is none."""
    terms = 2 if shape.scales == "none" else 1
    tokens = 2 * shape.hidden * columns
    # Between warps: sums of both halves of a pair for gate and up; before, of every expert its tokens as bits.
    exchanged = 8 * max(SLICE * columns, WARPS * shape.padded_experts)
    scales = 12 * blocks_of_run(LONGEST_RUN) * row_of_scales(shape) if shape.scales == "block" else 0
    free = _SHARED_MEMORY - _BESIDE - stages * 4 * SLICE * LINE - tokens - exchanged - scales
    return max(0, min(LONGEST_RUN, free // (columns * (2 * terms * SLICE + 4))))


def tile_columns(shape: MoEShape, tokens: int) -> int:
    """16 where an expert can be expected to have more than 8 tokens, and there is room for three stages beside them.
    Of experts with 8 tokens on average, so many have more that two stages will do, but not where there is a shared
    expert, which has them all."""
    expected = tokens * shape.top_k / shape.num_experts
    stages = _STAGES_OF_MANY if expected < 8 or shape.shared else 2
    return 16 if tokens > 8 and expected > 5 and longest_run(shape, 16, stages) >= _USUAL_RUN else 8


def tune_gluon_moe(shape: MoEShape, tokens: int) -> GluonMoETuning:
    """What was fastest on an H200, see docs/kernels/moe.md, or fewer stages, where there is no room for these and a
    run of usual length."""
    columns = tile_columns(shape, tokens)
    most = _STAGES_OF_ONE_TILE if tokens <= columns else _STAGES_OF_MANY
    return next(
        GluonMoETuning(SLICE, columns, run, stages)
        for least in (_USUAL_RUN, 1)
        for stages in range(most, 1, -1)
        if (run := longest_run(shape, columns, stages)) >= least
    )


def plan_gluon_moe(
    shape: MoEShape, tokens: int, num_sms: int, sums: Sums = "fixed", tuning: GluonMoETuning | None = None
) -> GluonMoEPlan:
    """The plan for up to `tokens` tokens on a GPU of `num_sms` multiprocessors."""
    tuning = tuning or tune_gluon_moe(shape, tokens)
    finishers = choose_finishers(shape, tokens, num_sms, sums, FINISH_BYTES)
    programs = min(most_items(shape, tokens, tuning.columns, tuning.slice), num_sms)
    return GluonMoEPlan(tuning, padded_tokens(tokens), programs, finishers, sums)


def padded_tokens(tokens: int) -> int:
    """Of tensors with a place for each: a power of two, at least one for each warp. A single token is routed by every
    warp, so that they have nothing to tell each other."""
    return 1 if tokens == 1 else max(WARPS, power_of_two(tokens))


def fits(shape: MoEShape, tuning: GluonMoETuning) -> bool:
    """Whether there is enough shared memory."""
    return 1 <= tuning.run <= longest_run(shape, tuning.columns, tuning.stages)
