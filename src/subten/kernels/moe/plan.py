"""What the one-launch mixture-of-experts kernel is told beyond its tensors: shape, tiles, and how work is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from subten.kernels.moe.inputs import SCALE_BLOCK, Experts, MoEWeights, Scoring

Scales = Literal["none", "channel", "block"]
Activations = Literal["16bit", "fp8x2", "fp8"]
"""What the tensor cores multiply FP8 weights with: tokens in 16 bit, and weights brought to 16 bit; or weights as
they are, and tokens as two terms in FP8 (whose sum has 8 bits of mantissa), or as one, with a scale per token and 128
columns. Relative errors of a layer, sums of products taken as exact: 3e-4, 1.5e-3 and 4e-2."""
Sums = Literal["fixed", "float"]
"""How programs add their shares of the output: as 64-bit integers, whose sum does not depend on the order, or as
float32 (half as many bytes, and another rounding from run to run)."""

_SLICES = (128, 64, 32)
_TILE_BYTES = 32768
"""Of one step of a loop over weights at most."""
_IN_FLIGHT = 65536
"""Bytes of weights that a program has requested at any time: with two programs on each of 132 multiprocessors 17 MB,
four times what memory delivers in the time of its latency."""
_SHARED_MEMORY, _REGISTERS = 220 << 10, 65536
_WARPS_OF_SYNC = 2
"""Fewer than a warp group, so that products of more than 8 columns are `mma.sync` too, as those of 8 are."""
_LOGITS_PER_THREAD = 64
"""That the routing has in registers; twice as many spill."""
_FINISH_BYTES = 32768
"""Of sums that one program turns into output: the time of a few round trips to the L2."""


@dataclass(frozen=True)
class MoEShape:
    """What of a block a kernel is compiled for; nothing of a batch.

    Attributes:
        hidden: width of a token.
        intermediate: width of an expert.
        num_experts: to choose from.
        top_k: that a token visits.
        renormalize: see `RouterSpec`, as the next two.
        scoring: likewise.
        factor: likewise.
        scales: of the weights.
        shared: width of the shared expert, 0 where there is none.
        cut: width of the slices of the down projection in memory, or None.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    renormalize: bool
    scoring: Scoring
    factor: float
    scales: Scales
    shared: int
    cut: int | None

    @classmethod
    def of(cls, weights: MoEWeights) -> MoEShape:
        """Of weights that `refusal` has no objection to."""
        rule, scale = weights.rule, weights.gate_up_scale
        return cls(
            hidden=weights.router.shape[1],
            intermediate=weights.experts.intermediate_size,
            num_experts=rule.num_experts,
            top_k=rule.top_k,
            renormalize=rule.renormalize,
            scoring=rule.scoring,
            factor=rule.factor,
            scales="none" if scale is None else "channel" if scale.ndim == 2 else "block",
            shared=0 if weights.shared is None else weights.shared.expert.intermediate_size,
            cut=weights.down.shape[3] if weights.down.ndim == 4 else None,
        )

    @property
    def padded_experts(self) -> int:
        """Experts as a tensor has them: a power of two, and whole words of bits."""
        return max(32, power_of_two(self.num_experts))

    @property
    def expert_bits(self) -> int:
        """Of the number of an expert, padded ones included."""
        return self.padded_experts.bit_length() - 1

    @property
    def scale_blocks(self) -> int:
        """Blocks of rows of a gate or up projection."""
        return -(-self.intermediate // SCALE_BLOCK)

    @property
    def shared_scale_blocks(self) -> int:
        """Likewise, of the shared expert."""
        return -(-self.shared // SCALE_BLOCK)

    @property
    def hidden_blocks(self) -> int:
        """Blocks of columns of a gate or up projection."""
        return -(-self.hidden // SCALE_BLOCK)


@dataclass(frozen=True)
class MoETuning:
    """How one program does its work.

    Attributes:
        slice: neurons of an expert that are one item of work: their rows of gate and up, their columns of down. With
            `activations`, this is all that the bits of a result depend on.
        activations: see `Activations`; "16bit" for weights without scales.
        block_k: columns of gate and up per step.
        block_h: rows of down per step.
        columns: tokens of an expert that are one item of work; more of them are further items.
        warps: of a program.
        stages: steps in flight, the one at work included.
        registers: of a thread at most.
    """

    slice: int
    activations: Activations
    block_k: int
    block_h: int
    columns: int
    warps: int
    stages: int
    registers: int


Tuning = TypeVar("Tuning")


@dataclass(frozen=True)
class LaunchPlan(Generic[Tuning]):
    """How a launch is split.

    Attributes:
        tuning: of a program.
        tokens: that a launch has room for, a power of two.
        programs: that share the work.
        finishers: programs that turn sums into output: the last to arrive, which wait for each other.
        sums: see `Sums`.
    """

    tuning: Tuning
    tokens: int
    programs: int
    finishers: int
    sums: Sums


MoEPlan = LaunchPlan[MoETuning]


def refusal(experts: Experts) -> str | None:
    """Why the kernel does not serve such experts, or None."""
    weight, hidden, intermediate = experts.gate_up, experts.hidden_size, experts.intermediate_size
    in_fp8 = weight.dtype == torch.float8_e4m3fn
    if not in_fp8 and weight.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes weights in 16 bit or FP8, not {weight.dtype}"
    if in_fp8 == (experts.gate_up_scale is None):
        return "weights in FP8 have scales, and others none"
    return size_refusal(hidden, intermediate)


def size_refusal(hidden: int, intermediate: int) -> str | None:
    """The same by sizes alone."""
    if hidden % 64 or intermediate % 32:
        return f"it takes a hidden size that is a multiple of 64 and experts of 32, not {hidden} and {intermediate}"
    return None


def slice_widths(shape: MoEShape) -> list[int]:
    """Widths that a slice can have, the widest first."""
    cut = shape.cut or _SLICES[0]
    sizes = (shape.intermediate, shape.shared, cut)
    return [width for width in _SLICES if all(size % width == 0 for size in sizes)]


def slice_width(shape: MoEShape, num_sms: int, tokens: int = 1) -> int:
    """The widest that leaves an item of work for every multiprocessor.

    On 132 multiprocessors and at one token, 2 experts of 9728 neurons are 152 items of 128; 8 of 768 are 96 items of
    64, and 192 of 32. All of them run at once, so that it does no harm that some multiprocessors have two: memory
    serves every program alike. Wider slices mean fewer additions into the sums, one per output, slice and expert of a
    token.
    """
    work = min(shape.num_experts, tokens * shape.top_k) * shape.intermediate + shape.shared
    widths = slice_widths(shape)
    return next((width for width in widths if work // width >= num_sms), widths[-1])


def tune_moe(
    shape: MoEShape, num_sms: int, activations: Activations = "16bit", tokens: int = 1, width: int | None = None
) -> MoETuning:
    """Tiles for slices of this width; by default, that for one token, so that the bits of a result do not depend on
    how many tokens there are."""
    width = width or slice_width(shape, num_sms)
    itemsize = 2 if shape.scales == "none" else 1
    columns = tile_columns(shape, activations, tokens)
    if activations == "16bit":
        many_logits = padded_tokens(tokens) * shape.padded_experts > _LOGITS_PER_THREAD * 32 * _WARPS_OF_SYNC
        warps = 4 if columns == 8 and (width > 32 or many_logits) else _WARPS_OF_SYNC
        registers = 168 if columns == 8 else 255
    else:
        warps = 4 if width < 64 else 8
        registers = 128 if columns <= 16 else 168 if warps == 4 else 255
    block_k = _divisor(shape.hidden, min(SCALE_BLOCK, _TILE_BYTES // (2 * width * itemsize)))
    block_h = _divisor(shape.hidden, max(64, min(128, 512 * warps // columns)))
    stages = max(3, min(6, _IN_FLIGHT // _step_bytes(width, block_k, itemsize, columns)))
    return MoETuning(width, activations, block_k, block_h, columns, warps, stages, registers)


def tile_columns(shape: MoEShape, activations: Activations, tokens: int) -> int:
    """For as many tokens as an expert can be expected to have, and half as many again.

    A column without a token is computed in vain, and so is a part of the work on each output; tokens beyond the last
    column take the slice's weights from the L2 once more. Of 8 experts for 2 each at 32 tokens, one has 8 of them on
    average and hardly ever more than 16; of 128 for 8 each, 2 and hardly ever more than 8. Tokens in FP8 are
    multiplied by warp groups, whose products of 8 columns are not made of FP8 everywhere.
    """
    least, most = (8, 16) if activations == "16bit" else (16, 64)
    expected = -(-3 * tokens * shape.top_k // (2 * shape.num_experts))
    return max(least, min(most, power_of_two(expected), padded_tokens(tokens)))


def plan_moe(
    shape: MoEShape,
    tokens: int,
    num_sms: int,
    activations: Activations = "16bit",
    sums: Sums = "fixed",
    tuning: MoETuning | None = None,
) -> MoEPlan:
    """The plan for up to `tokens` tokens on a GPU of `num_sms` multiprocessors.

    Programs are as many as run at once, each with several items where there are more: the routing is then looked at
    once per program.
    """
    tuning = tuning or tune_moe(shape, num_sms, activations, tokens)
    itemsize = 2 if shape.scales == "none" else 1
    step = _step_bytes(tuning.slice, tuning.block_k, itemsize, tuning.columns)
    resident = max(
        1,
        min(_SHARED_MEMORY // (step * tuning.stages), _REGISTERS // (32 * tuning.warps * tuning.registers)),
    )
    finishers = choose_finishers(shape, tokens, num_sms, sums, _FINISH_BYTES)
    programs = min(most_items(shape, tokens, tuning.columns, tuning.slice), resident * num_sms)
    return MoEPlan(tuning, padded_tokens(tokens), programs, finishers, sums)


def choose_finishers(shape: MoEShape, tokens: int, num_sms: int, sums: Sums, share: int) -> int:
    """Programs that turn sums into output, each `share` bytes of them, or more where that would be too many."""
    sum_bytes = tokens * shape.hidden * (8 if sums == "fixed" else 4)
    return max(1, min(-(-sum_bytes // share), num_sms // 2))


def most_items(shape: MoEShape, tokens: int, columns: int, width: int) -> int:
    """That there can be, whatever the routing, if each is for so many tokens and neurons."""
    visits = tokens * shape.top_k
    visited = min(shape.num_experts, visits)
    tiles = visited + (visits - visited) // columns
    shared = -(-tokens // columns) * shape.shared
    return (tiles * shape.intermediate + shared) // width


def padded_tokens(tokens: int) -> int:
    """Of tensors with a place for each: a power of two."""
    return max(8, power_of_two(tokens))


def power_of_two(n: int) -> int:
    """The next power of two from n on."""
    return 1 << (n - 1).bit_length()


def _divisor(size: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `size`."""
    return min(size & -size, 1 << (limit.bit_length() - 1))


def _step_bytes(width: int, block_k: int, itemsize: int, columns: int) -> int:
    """Of weights and tokens that one step of the first loop reads."""
    return 2 * width * block_k * itemsize + 2 * block_k * columns
