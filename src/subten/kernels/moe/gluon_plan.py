"""What the Gluon mixture-of-experts kernel is told beyond its tensors, and how a launch is split."""

from __future__ import annotations

from dataclasses import dataclass

from subten.kernels.moe.plan import LaunchPlan, MoEShape, Sums, choose_finishers, most_items, power_of_two

SLICE = 64
"""Neurons that go through the kernel together: four warps with 16 rows of gate and of up each."""
LINE = 128
"""Bytes of a row of a tile of gate or up: what one swizzle of the copy engine spans."""
_SHARED_MEMORY = 228 << 10
"""Of a multiprocessor, of which every program takes 1 KiB beside what it asks for."""
_BESIDE = 2 << 10
"""That 1 KiB, and what else a program has beside its tiles and its run: reductions and barriers."""
_LONGEST_RUN = 16
_FINISH_BYTES = 4096
"""Of sums that one program turns into output in one round trip to the L2."""
_GROUPED_ITEMS_PER_SM = 3.5
"""Fewer, and the last wave of items costs more than the additions that grouping saves."""
_MANY_LOGITS = 4096
"""Of 32 tokens and 128 experts; their routing takes 5 us."""


@dataclass(frozen=True)
class GluonMoETuning:
    """How one program does its work.

    Attributes:
        slice: neurons of an expert that go through the kernel together, 16 for each of four warps: their rows of gate
            and up, their columns of down. All that the bits of a result depend on.
        columns: tokens of an expert that are multiplied together.
        run: slices at most whose outputs are added up before they leave the program.
        warps: of a program. Of eight, four have the first tile of a pair of gate and up, and four the second.
        stages: pairs of tiles in shared memory, the one at work included.
        per_sm: programs that share a multiprocessor.
        staged: whether the tokens of a run are in shared memory; else they are loaded from global memory at each
            step.
        down_tiles: of a stage, two or one; of two the sums of twice as many outputs are in registers.
    """

    slice: int
    columns: int
    run: int
    warps: int
    stages: int
    per_sm: int
    staged: bool
    down_tiles: int

    @property
    def stage_bytes(self) -> int:
        """Of two tiles: a line each of every row of gate and up."""
        return 4 * self.slice * LINE

    @property
    def registers(self) -> int:
        """Of a thread at most."""
        return min(255, 65536 // (32 * self.warps * self.per_sm) // 8 * 8)


GluonMoEPlan = LaunchPlan[GluonMoETuning]


def shape_refusal(hidden: int, intermediate: int, shared: int = 0) -> str | None:
    """Why the kernel does not serve experts of these sizes, or None."""
    if hidden % 512 or hidden < 1024 or intermediate % SLICE or shared % SLICE:
        return (
            f"it takes a hidden size from 1024 on that is a multiple of 512 and experts of a multiple of {SLICE}, "
            f"not {hidden} and {intermediate}" + f" with a shared one of {shared}" * bool(shared)
        )
    return None


def tile_columns(shape: MoEShape, tokens: int) -> int:
    """For as many tokens as an expert can be expected to have, and half as many again."""
    expected = -(-3 * tokens * shape.top_k // (2 * shape.num_experts))
    return max(8, min(16, power_of_two(expected), power_of_two(tokens)))


def longest_run(shape: MoEShape, columns: int, warps: int, stages: int, per_sm: int, staged: bool) -> int:
    """Slices that there is room for in shared memory between gate and up and down; 0 where there is none."""
    terms = 2 if shape.scales == "none" else 1
    tokens = 2 * shape.hidden * columns if staged else 0
    halves = 8 * SLICE * columns if warps == 8 else 0
    free = _SHARED_MEMORY // per_sm - stages * 4 * SLICE * LINE - tokens - halves - _BESIDE
    return max(0, min(_LONGEST_RUN, free // (columns * (2 * terms * SLICE + 4))))


def tune_gluon_moe(shape: MoEShape, tokens: int, num_sms: int) -> GluonMoETuning:
    """TODO"""
    columns = tile_columns(shape, tokens)
    warps, stages, per_sm = (4, 2, 3) if columns == 8 else (8, 3, 2)
    return GluonMoETuning(
        SLICE, columns, longest_run(shape, columns, warps, stages, per_sm, False), warps, stages, per_sm, False, 2
    )


def expected_experts(shape: MoEShape, tokens: int) -> float:
    """That so many tokens visit if all experts are alike."""
    return shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)


def plan_gluon_moe(
    shape: MoEShape, tokens: int, num_sms: int, sums: Sums = "fixed", tuning: GluonMoETuning | None = None
) -> GluonMoEPlan:
    """The plan for up to `tokens` tokens on a GPU of `num_sms` multiprocessors."""
    tuning = tuning or tune_gluon_moe(shape, tokens, num_sms)
    finishers = choose_finishers(shape, tokens, num_sms, sums, _FINISH_BYTES)
    programs = min(most_items(shape, tokens, tuning.columns, tuning.slice), tuning.per_sm * num_sms)
    return GluonMoEPlan(tuning, padded_tokens(tokens), programs, finishers, sums)


def padded_tokens(tokens: int) -> int:
    """Of tensors with a place for each: a power of two, at least one for each warp."""
    return max(4, power_of_two(tokens))


def fits(shape: MoEShape, tuning: GluonMoETuning) -> bool:
    """Whether so many programs fit on a multiprocessor, and the pairs ahead of one at work are those of its slice and
    of gate and up of the next."""
    lines = shape.hidden * (2 if shape.scales == "none" else 1) // LINE
    longest = longest_run(shape, tuning.columns, tuning.warps, tuning.stages, tuning.per_sm, tuning.staged)
    return 1 <= tuning.run <= longest and 2 * (tuning.stages - 1) <= lines
