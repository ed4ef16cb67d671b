"""A mixture of experts for 1 to 64 tokens in one launch on sm_90, in Gluon: Triton with layouts by hand.

The work is that of triton_decode.py, which serves other GPUs and is the one to read first. What differs is how
weights reach a program: as one stream of tiles of 16 KiB through a ring in shared memory. A warp of its own asks the
copy engine for them (`fetch` in gluon_stream.py), ahead of the warps that multiply (`_work`, with the products in
gluon_products.py), across the end of gate and up, of down, and of a run. docs/kernels/moe.md has the reasons and the
measurements.

- A program has a multiprocessor to itself, and a range of the list of all slices (gluon_schedule.py). It works in
  runs: slices of 64 neurons of one expert, for as many of its tokens as a tile has columns.
- Tiles come in pairs. Of gate and up: two lines of every row of a slice. Four warps have the first, with 16 rows of
  gate and of up each, so that a thread holds both of a neuron, and four the second.
- Down lies in slices of 64 columns, one behind the other (`packing.cut_down`): a tile is 256 rows of a slice.
- Products of the slices of a run are added up as 64-bit integers, as they are in memory: how many slices make a run
  does not change a bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from subten.kernels.gluon_names import barrier
from subten.kernels.gluon_overlap import let_next_kernel_start, wait_for_previous_kernel
from subten.kernels.moe import triton_decode
from subten.kernels.moe.gluon_plan import (
    FINISH_BYTES,
    LINE,
    REGISTERS,
    WARPS,
    GluonMoEPlan,
    plan_gluon_moe,
)
from subten.kernels.moe.gluon_products import UNIT, multiply_run, operand_of, product_layout, terms_of
from subten.kernels.moe.gluon_routing import (
    all_of,
    choose,
    columns_of,
    divisors,
    load_logits,
    locate,
    masks_of_experts,
    shares_of,
    tiles_of_experts,
)
from subten.kernels.moe.gluon_scales import blocks_of_run, load_block_scales, row_of_scales, scales_of_run
from subten.kernels.moe.gluon_schedule import range_of, run_at
from subten.kernels.moe.gluon_stream import RUN_SIZE, fetch, post_run
from subten.kernels.moe.gluon_tokens import load_tokens, stage_tokens
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.plan import MoEShape
from subten.kernels.moe.reference import router_logits
from subten.kernels.moe.triton_decode import MoEScratch, multiprocessors

_LOG2_E = gl.constexpr(math.log2(math.e))
_LINE = gl.constexpr(LINE)
_WARPS = gl.constexpr(WARPS)
_MOST_EARLY = gl.constexpr(64 * 2 * 32 * WARPS)
"""Numbers of tokens that are loaded before the routing: 64 registers of each thread."""
_FINISH_BLOCK = gl.constexpr(FINISH_BYTES // 8)


@gluon.jit
def swiglu(gate, up):
    """silu(gate) * up, of float32."""
    return gate / (1 + gl.exp2(gate * -_LOG2_E)) * up


def moe_decode(
    x: Tensor,
    weights: MoEWeights,
    plan: GluonMoEPlan | None = None,
    scratch: MoEScratch | None = None,
    *,
    logits: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
    activation: Any = swiglu,
) -> Tensor:
    """See `subten.kernels.moe.triton_decode.moe_decode`. Down projections are cut into slices of `SLICE`.

    Tokens are multiplied in fp16 with FP8 weights, in the weights' type otherwise.
    """
    shape = MoEShape.of(weights)
    if not len(x):
        return torch.empty_like(x)
    plan = plan or plan_gluon_moe(shape, len(x), multiprocessors(x.device))
    scratch = scratch or MoEScratch.allocate(plan, shape.hidden, x.device)
    out = torch.empty(len(x), shape.hidden, dtype=x.dtype, device=x.device) if out is None else out
    logits = router_logits(x, weights) if logits is None else logits
    moe_kernel[(plan.programs,)](
        **decode_arguments(x, logits, weights, plan, scratch, out, activation, residual, factor),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return out


def decode_arguments(
    x: Tensor,
    logits: Tensor,
    weights: MoEWeights,
    plan: GluonMoEPlan,
    scratch: MoEScratch,
    out: Tensor,
    activation: Any = swiglu,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> dict[str, Any]:
    """All arguments of `moe_kernel`, see `moe_decode`: the Triton kernel's, with weights as tiles to be copied."""
    arguments = triton_decode.decode_arguments(x, logits, weights, plan, scratch, out, activation, residual, factor)
    shared, width = weights.shared, plan.tuning.slice
    return {
        **arguments,
        "gate_up": _gate_up_tiles(weights.gate_up, width),
        "down": _down_tiles(weights.down, width),
        "shared_gate_up": shared and _gate_up_tiles(shared.gate_up, width),
        "shared_down": shared and _down_tiles(shared.down, width),
    }


def _gate_up_tiles(weight: Tensor, width: int) -> TensorDescriptor:
    """Gate and up of all experts, [2 * experts, lines, neurons, line]: a pair of tiles is two lines of every row of a
    slice, gate in front of up."""
    *experts, rows, hidden = weight.shape
    line = LINE // weight.itemsize
    lines = weight.view(2 * math.prod(experts), rows // 2, hidden // line, line)
    return _tiles(lines.transpose(1, 2), [2, 2, width, line])


def _down_tiles(weight: Tensor, width: int) -> TensorDescriptor:
    """The slices of down of all experts one below the other: a pair of tiles is one piece of memory."""
    rows = 2 * LINE // weight.itemsize
    return _tiles(weight.view(-1, rows, width), [2, rows, width])


def _tiles(weight: Tensor, size: list[int]) -> TensorDescriptor:
    # The copy engine knows no FP8.
    plain = weight.view(torch.uint8) if weight.itemsize == 1 else weight
    line = size[-1] * weight.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=line, element_bitwidth=8 * weight.itemsize, rank=len(size))
    return TensorDescriptor.from_tensor(plain, size, layout)


@gluon.jit
def _run(
    place, end, block, tokens, masks, tiles, first_tile, shared_places, SHAPE: gl.constexpr, TUNING: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """The run that begins at a place of the list: whether it is of the shared expert, its expert, its first slice and
    how many it has, none at the end; the expert's tokens as bits, and which tile of columns it is for."""
    SLICES: gl.constexpr = SHAPE.intermediate // TUNING.slice
    COLUMNS: gl.constexpr = TUNING.columns
    last = gl.minimum(place, end - 1)
    expert, mask, of_expert, begin = locate(
        last - shared_places, masks, tiles, first_tile, SLICES, SHAPE.padded_experts, TOKENS, COLUMNS
    )
    begin += shared_places
    shared, slices = 0, SLICES
    if SHAPE.shared > 0:
        tiles_of_all = 1 if TOKENS <= COLUMNS else (tokens + COLUMNS - 1) // COLUMNS
        if last < shared_places:
            shared, expert, of_expert, begin, slices = 1, 0, tiles_of_all, 0, SHAPE.shared // TUNING.slice
            mask = all_of(tokens, masks.dtype)
    first, tile, length = run_at(last - begin, end - begin, block, of_expert, slices, TUNING.run)
    return (shared, expert, first, gl.where(place < end, length, 0)), mask, tile


@gluon.jit
def _shares(
    run, logits, logits_stride, columns, top, divisor, SHAPE: gl.constexpr, TOKENS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Weight of a run's expert for the tokens of columns; of the shared one, what its gate says, if it has one."""
    shared, expert, _, _ = run
    token, real = columns
    share = gl.full(token.shape, 1.0, gl.float32, layout=token.type.layout)
    if shared != 0:
        if GATED:
            gate = gl.load(logits + token * logits_stride + SHAPE.num_experts, mask=real, other=0.0).to(gl.float32)
            share = 1 / (1 + gl.exp2(gate * -_LOG2_E))
    else:
        share = shares_of(logits, expert, token, real, logits_stride, top, divisor, SHAPE, TOKENS)
    return share


@gluon.jit
def _work(
    x, logits, correction, gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale, sums, broken, tokens,
    x_stride, logits_stride, runs, ring, posted, full, empty, inners, units, staged, block_scales,
    SHAPE: gl.constexpr, TUNING: gl.constexpr, TOKENS: gl.constexpr, FIXED: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """All that the other warps do: routing, and the products of the program's runs. How many programs have any.

    The first tiles take longest: what is not needed to ask for them comes behind, while they are on their way.
    """
    COLUMNS: gl.constexpr = TUNING.columns
    # Tokens are then the same ones in every run.
    ONE_TILE: gl.constexpr = TOKENS <= COLUMNS
    # There are registers for them beside the logits.
    EARLY: gl.constexpr = ONE_TILE and SHAPE.hidden * COLUMNS <= _MOST_EARLY
    pipe = (ring, full, empty)
    kept = (inners, units)
    scales = (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale)

    wait_for_previous_kernel()
    let_next_kernel_start()
    loaded = load_logits(logits, tokens, logits_stride, False, SHAPE, TOKENS, _WARPS)
    if EARLY:
        values = load_tokens(x, x_stride, all_of(tokens, gl.int32), 0, staged, TOKENS)
    chosen = choose(loaded, correction, tokens, SHAPE, TOKENS, _WARPS)
    masks = masks_of_experts(chosen, TOKENS, _WARPS)
    tiles, first_tile, all_tiles = tiles_of_experts(masks, SHAPE.top_k, TOKENS, COLUMNS)
    shared_places = SHAPE.shared // TUNING.slice * ((tokens + COLUMNS - 1) // COLUMNS)
    places = shared_places + all_tiles * (SHAPE.intermediate // TUNING.slice)
    place, end, length, arriving = range_of(gl.program_id(0), places, gl.num_programs(0), not ONE_TILE)
    here, mask, tile = _run(
        place, end, length, tokens, masks, tiles, first_tile, shared_places, SHAPE, TUNING, TOKENS
    )
    number = 0
    turn = 0
    post_run(runs, posted, number, here)
    # Read again, or else the compiler would put some of this in front. So it would with tokens but for the condition.
    loaded = load_logits(logits, tokens, logits_stride, True, SHAPE, TOKENS, _WARPS)
    top, divisor = divisors(loaded, chosen, tokens, SHAPE, TOKENS, _WARPS)
    if ONE_TILE and place < end:
        if not EARLY:
            values = load_tokens(x, x_stride, all_of(tokens, gl.int32), 0, staged, TOKENS)
        stage_tokens(staged, values)
    while place < end:
        run = here
        place += run[3]
        number += 1
        # What takes a round trip to memory is asked for first.
        of_run = scales_of_run(run, scales, SHAPE)
        of_blocks = load_block_scales(run, of_run, SHAPE, TUNING)
        if not ONE_TILE:
            loading = load_tokens(x, x_stride, mask, tile, staged, TOKENS)
        here, next_mask, next_tile = _run(
            place, end, length, tokens, masks, tiles, first_tile, shared_places, SHAPE, TUNING, TOKENS
        )
        columns = columns_of(mask, tile, TOKENS, COLUMNS, gl.SliceLayout(0, product_layout()))
        share = _shares(run, logits, logits_stride, columns, top, divisor, SHAPE, TOKENS, GATED)
        if not ONE_TILE:
            stage_tokens(staged, loading)
        post_run(runs, posted, number, here)
        turn = multiply_run(
            run, turn, pipe, staged, of_run, of_blocks, block_scales, kept, columns, share, (sums, broken), SHAPE,
            TUNING, FIXED, ACTIVATION,
        )  # fmt: skip
        mask, tile = next_mask, next_tile
    return (arriving,)


@gluon.jit
def _finish(
    sums, broken, residual, out, tokens, factor, number, finishers, SHAPE: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """Turn every `finishers`-th block of sums, from `number` on, into output, and clear it. Every thread clears what
    it has read: the layout is one."""
    BLOCK: gl.constexpr = _FINISH_BLOCK
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [_WARPS], [0])
    offset = gl.arange(0, BLOCK, layout=LAYOUT)
    for start in range(number * BLOCK, tokens * SHAPE.hidden, finishers * BLOCK):
        at = start + offset
        inside = at < tokens * SHAPE.hidden
        value = gl.load(sums + at, mask=inside, other=0, cache_modifier=".cg")
        if FIXED:
            lost = gl.load(broken + at // SHAPE.hidden, mask=inside, other=0, cache_modifier=".cg")
            value = gl.where(lost != 0, float("nan"), value.to(gl.float32) * UNIT)
        value *= factor
        if residual is not None:
            value += gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        gl.store(sums + at, gl.zeros([BLOCK], sums.dtype.element_ty, layout=LAYOUT), mask=inside)


@gluon.jit
def _arrive(
    sums, broken, counters, residual, out, tokens, factor, arriving, SHAPE: gl.constexpr, TOKENS: gl.constexpr,
    FINISHERS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """The end of a program that had work, one of as many as are `arriving`. The last ones finish the launch and leave
    the scratch memory as it was."""
    finishers = gl.minimum(arriving, FINISHERS)
    # All warps have added before the counter says so; that also acquires what others have added.
    barrier()
    ticket = gl.atomic_add(counters, 1, sem="acq_rel")
    if ticket >= arriving - finishers:
        if FINISHERS > 1:
            while gl.atomic_add(counters, 0, sem="acquire") < arriving:
                pass
        number = ticket - (arriving - finishers)
        _finish(sums, broken, residual, out, tokens, factor, number, finishers, SHAPE, FIXED)
        barrier()
        left = 0
        if FINISHERS > 1:
            left = gl.atomic_add(counters + 1, 1, sem="acq_rel")
        if left == finishers - 1:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
            token = gl.arange(0, TOKENS, layout=LAYOUT)
            gl.store(broken + token, gl.zeros([TOKENS], gl.int32, layout=LAYOUT))
            gl.store(counters, 0)
            gl.store(counters + 1, 0)


@gluon.jit(do_not_specialize=["tokens"])
def moe_kernel(
    x, logits, correction, gate_up, gate_up_scale, down, down_scale, shared_gate_up, shared_gate_up_scale,
    shared_down, shared_down_scale, sums, broken, counters, residual, out, tokens, x_stride, logits_stride, factor,
    SHAPE: gl.constexpr, TUNING: gl.constexpr, TOKENS: gl.constexpr, FINISHERS: gl.constexpr, FIXED: gl.constexpr,
    GATED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. The shared expert's part of the list comes first, then those of visited ones."""
    HIDDEN: gl.constexpr = SHAPE.hidden
    COLUMNS: gl.constexpr = TUNING.columns
    STAGES: gl.constexpr = TUNING.stages
    WORD: gl.constexpr = gate_up.dtype
    SIZE: gl.constexpr = WORD.primitive_bitwidth // 8
    STEP: gl.constexpr = gate_up.block_shape[3]
    OPERAND: gl.constexpr = operand_of(WORD)
    TERMS: gl.constexpr = terms_of(OPERAND)
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8 * SIZE, rank=2)
    INNER: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(16 // SIZE, 1, 4 * SIZE, [1, 2, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()

    ring = gl.allocate_shared_memory(WORD, [STAGES, 4 * TUNING.slice, STEP], RING)
    inners = gl.allocate_shared_memory(OPERAND, [TUNING.run * TERMS, TUNING.slice, COLUMNS], INNER)
    units = gl.allocate_shared_memory(gl.float32, [TUNING.run, COLUMNS], FLAT)
    staged = gl.allocate_shared_memory(OPERAND, [HIDDEN // (2 * STEP), 2, STEP, COLUMNS], STAGED)
    runs = gl.allocate_shared_memory(gl.int32, [2, RUN_SIZE], FLAT)
    block_scales = ()
    if SHAPE.scales == "block":
        BLOCKS: gl.constexpr = blocks_of_run(TUNING.run)
        SCALES: gl.constexpr = row_of_scales(SHAPE)
        ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        block_scales = (
            gl.allocate_shared_memory(gl.float32, [1, BLOCKS, 2 * SCALES], ROWS),
            gl.allocate_shared_memory(gl.float32, [1, BLOCKS, SCALES], ROWS),
        )
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    introduced = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(introduced, count=1)
    for i in gl.static_range(2):
        mbarrier.init(posted.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    (arriving,) = gl.warp_specialize(
        [
            (
                _work,
                (
                    x, logits, correction, gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale, sums,
                    broken, tokens, x_stride, logits_stride, runs, ring, posted, full, empty, inners, units, staged,
                    block_scales, SHAPE, TUNING, TOKENS, FIXED, GATED, ACTIVATION,
                ),
            ),
            (
                fetch,
                (
                    gate_up, down, shared_gate_up, shared_down, runs, ring, posted, full, empty, introduced, SHAPE,
                    TUNING,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip

    if gl.program_id(0) < arriving:
        _arrive(sums, broken, counters, residual, out, tokens, factor, arriving, SHAPE, TOKENS, FINISHERS, FIXED)
