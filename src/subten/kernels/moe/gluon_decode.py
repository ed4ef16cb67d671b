"""A mixture of experts for 1 to 64 tokens in one launch on sm_90, in Gluon: Triton with layouts by hand.

The work is that of triton_decode.py, which serves other GPUs and is the one to read first. What differs is how
weights reach a program: as one stream of tiles of 16 KiB through a ring in shared memory. A warp of its own asks the
copy engine for them (`_fetch`), ahead of the warps that multiply (`_work`), across the end of gate and up, of down,
and of a run. docs/kernels/moe.md has the reasons and the measurements.

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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from subten.kernels.gluon_overlap import let_next_kernel_start, wait_for_previous_kernel
from subten.kernels.moe import triton_decode
from subten.kernels.moe.gluon_plan import (
    FINISH_BYTES,
    LINE,
    REGISTERS,
    WARPS,
    GluonMoEPlan,
    blocks_of_run,
    plan_gluon_moe,
    row_of_scales,
)
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
from subten.kernels.moe.gluon_schedule import range_of, run_at
from subten.kernels.moe.inputs import SCALE_BLOCK, MoEWeights
from subten.kernels.moe.plan import MoEShape
from subten.kernels.moe.reference import router_logits
from subten.kernels.moe.triton_decode import MoEScratch, multiprocessors

# What Triton 3.7 and later have under other names.
_Memory = gl.shared_memory_descriptor
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret

_LOG2_E = gl.constexpr(math.log2(math.e))
_LINE = gl.constexpr(LINE)
_WARPS = gl.constexpr(WARPS)
_SCALE_BLOCK = gl.constexpr(SCALE_BLOCK)
_UNIT = gl.constexpr(2.0**-32)
"""Of the sums: a token whose outputs are as small as 1e-3 still gets them to 2e-7."""
_LARGEST_SHARE = gl.constexpr(2.0**18)
"""What an item may add to an output; 2^13 of these fit. A token with larger ones becomes NaN, not something wrong."""
_INFINITY = gl.constexpr(0x7F800000)
_MOST_EARLY = gl.constexpr(64 * 2 * 32 * WARPS)
"""Numbers of tokens that are loaded before the routing: 64 registers of each thread."""
_FINISH_BLOCK = gl.constexpr(FINISH_BYTES // 8)
_RUN_SIZE = gl.constexpr(4)
"""Numbers that say what a run is."""


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


# --- the stream of tiles -----------------------------------------------------------------------------------------


@gluon.jit
def _introduce(weights, ring, introduced, TUNING: gl.constexpr):
    """Have the copy engine read the descriptions of weights, which lie in memory and are kept from then on: it is
    asked for the pair of tiles in front of all there are, for which it reads nothing else and writes zeros."""
    mbarrier.expect(introduced, len(weights) * TUNING.stage_bytes)
    for i in gl.static_range(len(weights)):
        stage = _as_tiles(ring.index(i % 2), weights[i])
        _copy(weights[i], [-stage.shape[0]] + [0] * (len(stage.shape) - 1), introduced, stage)
    mbarrier.wait(introduced, 0)


@gluon.jit
def _fetch(
    gate_up, down, shared_gate_up, shared_down, runs, ring, posted, full, empty, introduced, SHAPE: gl.constexpr,
    TUNING: gl.constexpr,
):  # fmt: skip
    """All that one warp does: ask for the tiles of every run that is posted, up to one without slices."""
    pipe = (ring, full, empty)
    # There is nothing else to do until the first run is posted.
    if SHAPE.shared > 0:
        _introduce((gate_up, down, shared_gate_up, shared_down), ring, introduced, TUNING)
    else:
        _introduce((gate_up, down), ring, introduced, TUNING)
    number = 0
    turn = 0
    run = _posted_run(runs, posted, number)
    while run[3] > 0:
        if SHAPE.shared > 0:
            if run[0] != 0:
                turn = _fetch_run(shared_gate_up, shared_down, run, turn, pipe, SHAPE, TUNING)
            else:
                turn = _fetch_run(gate_up, down, run, turn, pipe, SHAPE, TUNING)
        else:
            turn = _fetch_run(gate_up, down, run, turn, pipe, SHAPE, TUNING)
        number += 1
        run = _posted_run(runs, posted, number)


@gluon.jit
def _fetch_run(gate_up, down, run, turn, pipe, SHAPE: gl.constexpr, TUNING: gl.constexpr):
    """Gate and up slice by slice, then down rows by rows. `turn` counts the pairs of a program."""
    PAIRS: gl.constexpr = SHAPE.hidden // (2 * gate_up.block_shape[3])
    TILES: gl.constexpr = SHAPE.hidden // down.block_shape[1]
    _, expert, first, slices = run
    for member in range(first, first + slices):
        for pair in range(PAIRS):
            stage, bar = _free_stage(turn, pipe, TUNING)
            _copy(gate_up, [2 * expert, 2 * pair, member * TUNING.slice, 0], bar, _as_tiles(stage, gate_up))
            turn += 1
    begin = expert * (SHAPE.intermediate // TUNING.slice) + first
    for number in range(TILES // 2):
        rows = 2 * _rows_at(number, first, TILES // 2)
        for member in range(begin, begin + slices):
            stage, bar = _free_stage(turn, pipe, TUNING)
            _copy(down, [member * TILES + rows, 0, 0], bar, _as_tiles(stage, down))
            turn += 1
    return turn


@gluon.jit
def _rows_at(number, first, STEPS: gl.constexpr):
    """Which rows of down come as the `number`-th in a run. Runs begin at different ones, so that programs do not all
    add to the same sums, but for those that read the same slices at the same time."""
    return (number + first) % STEPS


@gluon.jit
def _free_stage(turn, pipe, TUNING: gl.constexpr):
    """The next stage, when all warps have read what was in it, and the barrier that now expects what comes next."""
    ring, full, empty = pipe
    place = turn % TUNING.stages
    mbarrier.wait(empty.index(place), (turn // TUNING.stages & 1) ^ 1)
    mbarrier.expect(full.index(place), TUNING.stage_bytes)
    return ring.index(place), full.index(place)


@gluon.jit
def _as_tiles(stage, weights):
    """A stage of the ring as the copy engine fills it from `weights`."""
    return _reinterpret(stage, weights.dtype, weights.block_shape, weights.layout)


@gluon.jit
def _post_run(runs, posted, number, run):
    """Tell the warp that fetches tiles where those of a run are. There is room for two runs: tiles of the one before
    the last have come when this one is posted."""
    index = gl.arange(0, _RUN_SIZE, layout=gl.BlockedLayout([1], [32], [_WARPS], [0]))
    fields = gl.where(index == 0, run[0], run[1])
    for i in gl.static_range(2, len(run)):
        fields = gl.where(index < i, fields, run[i])
    runs.index(number % 2).store(fields)
    mbarrier.arrive(posted.index(number % 2), count=1)


@gluon.jit
def _posted_run(runs, posted, number):
    """What was posted, as soon as it is."""
    mbarrier.wait(posted.index(number % 2), number // 2 & 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Of tensors with one number, the sum is that number.
    numbers = _reinterpret(runs, gl.int32, [2 * _RUN_SIZE, 1], runs.layout)
    run = ()
    for i in gl.static_range(_RUN_SIZE):
        run += (gl.sum(numbers.index(number % 2 * _RUN_SIZE + i).load(LAYOUT), 0),)
    return run


# --- runs --------------------------------------------------------------------------------------------------------


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


@gluon.constexpr_function
def _steps_at_once(steps):
    """Of tokens that are loaded and stored as one tensor: their number is a power of two."""
    return steps & -steps


@gluon.jit
def _load_tokens(x, x_stride, mask, tile, STEPS: gl.constexpr, STEP: gl.constexpr, COLUMNS: gl.constexpr,
                 TOKENS: gl.constexpr):  # fmt: skip
    """The tokens of a tile of columns, as tensors of as many steps as can be one."""
    PARTS: gl.constexpr = 2 * _steps_at_once(STEPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, STEP // 8, 256 // STEP], [2, 1, _WARPS // 2], [1, 2, 0])
    column, real = columns_of(mask, tile, TOKENS, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None] * STEP
    sources = x + column[None, None, :] * x_stride + part + k
    values = ()
    for i in gl.static_range(2 * STEPS // PARTS):
        values += (gl.load(sources + i * PARTS * STEP, mask=real[None, None, :], other=0.0),)
    return values


@gluon.jit
def _stage_tokens(staged, values, OPERAND: gl.constexpr):
    """Store what `_load_tokens` has loaded. Few large tensors: there is a barrier between two."""
    COUNT: gl.constexpr = len(values)
    PARTS: gl.constexpr = values[0].shape[0]
    parts = _reinterpret(staged, OPERAND, [COUNT, PARTS, staged.shape[2], staged.shape[3]], staged.layout)
    for i in gl.static_range(COUNT):
        parts.index(i).store(_as_operand(values[i], OPERAND))


@gluon.jit
def _wide(tile, operand):
    """Weights from shared memory as operand of the tensor core."""
    if tile.dtype == gl.uint8:
        return tile.to(gl.float8e4nv, bitcast=True).to(operand)
    else:
        return tile


@gluon.jit
def _as_operand(tokens, operand):
    """Tokens as operand of the tensor core. Of two in bf16, one is shifted up and one masked, which the compiler
    would do in three steps."""
    if tokens.dtype == gl.bfloat16 and operand == gl.float16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r",
            [tokens],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tokens.to(operand)


@gluon.jit
def _load_block_scales(
    gate_up, down, first_block, blocks, scale_blocks, SHAPE: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Of the blocks of neurons of a run, [BLOCKS, rows of scales in shared memory]: of gate and up in the order of
    steps, 2 blocks of columns of gate, then of up; of down in that of its rows."""
    SIZE: gl.constexpr = row_of_scales(SHAPE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [_WARPS, 1], [1, 0])
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    number = gl.arange(0, 2 * SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    of_columns, of_up = number // 4 * 2 + number % 2, number // 2 % 2
    row = first_block + block + of_up * scale_blocks
    wanted = (block < blocks) & (of_columns < SHAPE.hidden_blocks)
    gates = gl.load(gate_up + row * SHAPE.hidden_blocks + of_columns, mask=wanted, other=0.0)
    number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    wanted = (block < blocks) & (number < SHAPE.hidden_blocks)
    return gates, gl.load(down + number * scale_blocks + first_block + block, mask=wanted, other=0.0)


@gluon.jit
def _row_scales(scales, step, row, SHAPE: gl.constexpr):
    """Of channels: those of the rows of each tile of down of a step, beyond the last step those of the first."""
    ROWS: gl.constexpr = row.shape[0]
    STEPS: gl.constexpr = SHAPE.hidden // (2 * ROWS)
    of_tiles = ()
    for i in gl.static_range(2):
        if SHAPE.scales == "channel":
            of_tiles += (gl.load(scales + (step % STEPS * 2 + i) * ROWS + row),)
        else:
            of_tiles += (1.0,)
    return of_tiles


@gluon.jit
def _add_scaled(total, rows, tokens, scales):
    """A step of the sums of gate or of up, those of both tiles, each with a scale in shared memory."""
    OF_TILE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout))
    product = mma_v2(_wide(rows, tokens.dtype), tokens, gl.zeros_like(total))
    return total + product * scales.load(OF_TILE)[:, None, None]


@gluon.jit
def _multiply_down(rows, inner):
    """The product of a tile of down; `inner` has one term or two."""
    ACC: gl.constexpr = rows.type.layout.parent
    ROWS: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = inner[0].shape[1]
    wide = _wide(rows, inner[0].dtype)
    product = gl.zeros([ROWS, COLUMNS], gl.float32, layout=ACC)
    for term in gl.static_range(len(inner)):
        product = mma_v2(wide, inner[term], product)
    return product


@gluon.jit
def _times_blocks(product, scales, units):
    """Times the scales of its blocks of rows and the factors of its columns, both in shared memory: one
    multiplication for each number, as the product of both factors is known once for a block."""
    ROWS: gl.constexpr = product.shape[0]
    COLUMNS: gl.constexpr = product.shape[1]
    blocks = product.reshape([ROWS // _SCALE_BLOCK, _SCALE_BLOCK, COLUMNS])
    OF_BLOCK: gl.constexpr = gl.SliceLayout(1, blocks.type.layout)
    scale = scales.load(gl.SliceLayout(1, OF_BLOCK))[:, None] * units.load(gl.SliceLayout(0, OF_BLOCK))[None, :]
    scaled = (blocks * scale[:, None, :]).reshape([ROWS, COLUMNS])
    return gl.convert_layout(scaled, product.type.layout, assert_trivial=True)


@gluon.jit
def _power_of_two(bits):
    """The largest one up to a float32 of these bits, within bounds that have an inverse."""
    power = (bits & _INFINITY).to(gl.float32, bitcast=True)
    return gl.minimum(gl.maximum(power, 2.0**-100), 2.0**100)


@gluon.jit
def _peak(product, like):
    """The largest magnitudes of every row that a thread has: [rows, columns] to the size of `like`."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    blocks = product.reshape([product.shape[0] // ROWS, ROWS, COLUMNS])
    return gl.convert_layout(gl.max(gl.abs(blocks), 0), like.type.layout, assert_trivial=True)


@gluon.jit
def _add(sums, values, wanted):
    """Add the columns that are wanted to sums in memory. As `gl.atomic_add`, but that there is no branch for each
    number of a thread, and that the L2 is asked to keep the sums while weights go through it."""
    masks = gl.zeros_like(values).to(gl.int32) + wanted.to(gl.int32)[None, :]
    PREFIX: gl.constexpr = (
        "{ .reg .pred p; .reg .b64 kept; setp.ne.u32 p, $3, 0; createpolicy.fractional.L2::evict_last.b64 kept, 1.0;"
        " @p red.relaxed.gpu.global.add.L2::cache_hint."
    )
    if values.dtype == gl.int64:
        gl.inline_asm_elementwise(
            PREFIX + "u64 [$1], $2, kept; mov.b32 $0, 0; }", "=r,l,l,r", [sums.to(gl.int64), values, masks],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            PREFIX + "f32 [$1], $2, kept; mov.b32 $0, 0; }", "=r,l,f,r", [sums.to(gl.int64), values, masks],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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
            value = gl.where(lost != 0, float("nan"), value.to(gl.float32) * _UNIT)
        value *= factor
        if residual is not None:
            value += gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        gl.store(sums + at, gl.zeros([BLOCK], sums.dtype.element_ty, layout=LAYOUT), mask=inside)


@gluon.jit
def _work(
    x, logits, correction, gate_up, gate_up_scale, down, down_scale, shared_gate_up_scale, shared_down_scale, sums,
    broken, tokens, x_stride, logits_stride, runs, ring, posted, full, empty, inners, units, staged, block_scales,
    SHAPE: gl.constexpr, TUNING: gl.constexpr, TOKENS: gl.constexpr, FIXED: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """All that the other warps do: routing, and the products of the program's runs. How many programs have any.

    The first tiles take longest: what is not needed to ask for them comes behind, while they are on their way.
    """
    HIDDEN: gl.constexpr = SHAPE.hidden
    SLICE: gl.constexpr = TUNING.slice
    COLUMNS: gl.constexpr = TUNING.columns
    STAGES: gl.constexpr = TUNING.stages
    WORD: gl.constexpr = gate_up.dtype
    SIZE: gl.constexpr = WORD.primitive_bitwidth // 8
    STEP: gl.constexpr = gate_up.block_shape[3]
    STEPS: gl.constexpr = HIDDEN // (2 * STEP)
    ROWS: gl.constexpr = down.block_shape[1]
    OPERAND: gl.constexpr = gl.float16 if SIZE == 1 else WORD
    TERMS: gl.constexpr = 2 if OPERAND.is_bf16() else 1
    K_WIDTH: gl.constexpr = 4 // SIZE
    # Tokens are then the same ones in every run.
    ONE_TILE: gl.constexpr = TOKENS <= COLUMNS
    # There are registers for them beside the logits.
    EARLY: gl.constexpr = ONE_TILE and HIDDEN * COLUMNS <= _MOST_EARLY
    # Gate and up: [tile of the pair, neuron, token]. Four warps have 16 neurons each, of both tiles, or eight of one.
    PAIR: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[_WARPS // 4, 4, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIR, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PAIR, K_WIDTH)
    # Their sums, and down: [neuron or row, token].
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, 8])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    GATE_UP_PAIR: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8 * SIZE, rank=3)
    DOWN_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SLICE * SIZE, element_bitwidth=8 * SIZE, rank=2)

    DOWN_STEPS: gl.constexpr = HIDDEN // (2 * ROWS)
    SCALES: gl.constexpr = row_of_scales(SHAPE)
    BLOCKS: gl.constexpr = blocks_of_run(TUNING.run)
    if SHAPE.scales == "block":
        # By two, as they belong to the two tiles of a pair, or to the two blocks of rows of a tile.
        TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        of_gate_up = _reinterpret(block_scales[0], gl.float32, [BLOCKS * SCALES, 2], TWO)
        of_down = _reinterpret(block_scales[1], gl.float32, [BLOCKS * SCALES // 2, 2], TWO)

    wait_for_previous_kernel()
    let_next_kernel_start()
    loaded = load_logits(logits, tokens, logits_stride, False, SHAPE, TOKENS, _WARPS)
    if EARLY:
        values = _load_tokens(x, x_stride, all_of(tokens, gl.int32), 0, STEPS, STEP, COLUMNS, TOKENS)
    chosen = choose(loaded, correction, tokens, SHAPE, TOKENS, _WARPS)
    masks = masks_of_experts(chosen, TOKENS, _WARPS)
    tiles, first_tile, all_tiles = tiles_of_experts(masks, SHAPE.top_k, TOKENS, COLUMNS)
    shared_places = SHAPE.shared // SLICE * ((tokens + COLUMNS - 1) // COLUMNS)
    places = shared_places + all_tiles * (SHAPE.intermediate // SLICE)
    place, end, length, arriving = range_of(gl.program_id(0), places, gl.num_programs(0), not ONE_TILE)
    here, mask, tile = _run(
        place, end, length, tokens, masks, tiles, first_tile, shared_places, SHAPE, TUNING, TOKENS
    )
    number = 0
    turn = 0
    _post_run(runs, posted, number, here)
    # Read again, or else the compiler would put some of this in front. So it would with tokens but for the condition.
    loaded = load_logits(logits, tokens, logits_stride, True, SHAPE, TOKENS, _WARPS)
    top, divisor = divisors(loaded, chosen, tokens, SHAPE, TOKENS, _WARPS)
    if ONE_TILE and place < end:
        if not EARLY:
            values = _load_tokens(x, x_stride, all_of(tokens, gl.int32), 0, STEPS, STEP, COLUMNS, TOKENS)
        _stage_tokens(staged, values, OPERAND)
    while place < end:
        shared, expert, first, slices = here
        neuron = first * SLICE
        place += slices
        number += 1
        # What takes a round trip to memory is asked for first.
        gate_scales, down_scales = gate_up_scale, down_scale
        width = SHAPE.intermediate
        scale_blocks = SHAPE.scale_blocks
        if SHAPE.scales == "channel":
            gate_scales = gate_up_scale + expert.to(gl.int64) * (2 * SHAPE.intermediate)
            down_scales = down_scale + expert.to(gl.int64) * HIDDEN
        elif SHAPE.scales == "block":
            gate_scales = gate_up_scale + expert.to(gl.int64) * (2 * SHAPE.scale_blocks * SHAPE.hidden_blocks)
            down_scales = down_scale + expert.to(gl.int64) * (SHAPE.scale_blocks * SHAPE.hidden_blocks)
        if SHAPE.shared > 0:
            width = gl.where(shared != 0, SHAPE.shared, SHAPE.intermediate)
            scale_blocks = gl.where(shared != 0, SHAPE.shared_scale_blocks, SHAPE.scale_blocks)
            if SHAPE.scales != "none":
                gate_scales = gl.where(shared != 0, shared_gate_up_scale, gate_scales)
                down_scales = gl.where(shared != 0, shared_down_scale, down_scales)
        first_block = neuron // _SCALE_BLOCK
        if SHAPE.scales == "block":
            blocks = (neuron + slices * SLICE - 1) // _SCALE_BLOCK + 1 - first_block
            of_blocks = _load_block_scales(gate_scales, down_scales, first_block, blocks, scale_blocks, SHAPE, BLOCKS)
        if not ONE_TILE:
            loading = _load_tokens(x, x_stride, mask, tile, STEPS, STEP, COLUMNS, TOKENS)
        here, next_mask, next_tile = _run(
            place, end, length, tokens, masks, tiles, first_tile, shared_places, SHAPE, TUNING, TOKENS
        )
        of_column, real = columns_of(mask, tile, TOKENS, COLUMNS, BY_COLUMN)
        share = gl.full([COLUMNS], 1.0, gl.float32, layout=BY_COLUMN)
        if shared != 0:
            if GATED:
                gate_logit = gl.load(logits + of_column * logits_stride + SHAPE.num_experts, mask=real, other=0.0).to(
                    gl.float32
                )
                share = 1 / (1 + gl.exp2(gate_logit * -_LOG2_E))
        else:
            share = shares_of(logits, expert, of_column, real, logits_stride, top, divisor, SHAPE, TOKENS)
        if not ONE_TILE:
            _stage_tokens(staged, loading, OPERAND)
        _post_run(runs, posted, number, here)
        odd = ((share.to(gl.int32, bitcast=True) & _INFINITY) == _INFINITY).to(gl.int32)

        # Gate and up, slice by slice.
        if SHAPE.scales == "block":
            for i in gl.static_range(2):
                block_scales[i].index(0).store(of_blocks[i])
        for g in range(slices):
            gates = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
            ups = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
            block = (neuron + g * SLICE) // _SCALE_BLOCK - first_block
            if SHAPE.scales == "channel":
                row = gate_scales + neuron + g * SLICE + gl.arange(0, SLICE, layout=BY_ROW)
                gate_scale, up_scale = gl.load(row)[:, None], gl.load(row + width)[:, None]
            for step in range(STEPS):
                at = turn % STAGES
                mbarrier.wait(full.index(at), turn // STAGES & 1)
                pair = _reinterpret(ring.index(at), WORD, [2, 2, SLICE, STEP], GATE_UP_PAIR)
                gate_rows = pair.index(0).load(LEFT)
                up_rows = pair.index(1).load(LEFT)
                mbarrier.arrive(empty.index(at), count=1)
                operand = staged.index(step).load(RIGHT)
                if SHAPE.scales == "block":
                    of_step = (block * (SCALES // 2) + step) * 2
                    gates = _add_scaled(gates, gate_rows, operand, of_gate_up.index(of_step))
                    ups = _add_scaled(ups, up_rows, operand, of_gate_up.index(of_step + 1))
                else:
                    gates = mma_v2(_wide(gate_rows, OPERAND), operand, gates)
                    ups = mma_v2(_wide(up_rows, OPERAND), operand, ups)
                turn += 1
            gate = gl.convert_layout(gl.sum(gates, 0), ACC)
            up = gl.convert_layout(gl.sum(ups, 0), ACC)
            if SHAPE.scales == "channel":
                gate *= gate_scale
                up *= up_scale
            inner = ACTIVATION(gate, up)
            # Brought to at most two, lest it overflow in 16 bit.
            largest = gl.max(inner.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
            odd |= (largest >= _INFINITY).to(gl.int32)
            unit = _power_of_two(largest)
            inner *= (1 / unit)[None, :]
            rounded = inner.to(OPERAND)
            inners.index(g * TERMS).store(rounded)
            if TERMS == 2:
                # Rounding to 8 bits of mantissa would be most of the error: the rest is multiplied as well.
                inners.index(g * TERMS + 1).store((inner - rounded.to(gl.float32)).to(OPERAND))
            units.index(g).store(share * unit * (1 / _UNIT if FIXED else 1.0))

        # Down: of two tiles of rows all slices, then their sum is added to that in memory.
        summed = real & (odd == 0) if FIXED else real
        row = gl.arange(0, ROWS, layout=BY_ROW)
        outputs = sums + of_column[None, :] * HIDDEN + row[:, None]
        peak = gl.zeros([16 * _WARPS, COLUMNS], gl.float32, layout=ACC)
        scales = _row_scales(down_scales, first, row, SHAPE)
        for turned in range(DOWN_STEPS):
            step = _rows_at(turned, first, DOWN_STEPS)
            nothing = gl.zeros([ROWS, COLUMNS], sums.dtype.element_ty, layout=ACC)
            added = (nothing, nothing)
            for g in range(slices):
                block = (neuron + g * SLICE) // _SCALE_BLOCK - first_block
                inner = ()
                for term in gl.static_range(TERMS):
                    inner += (inners.index(g * TERMS + term).load(gl.DotOperandLayout(1, ACC, K_WIDTH)),)
                at = turn % STAGES
                mbarrier.wait(full.index(at), turn // STAGES & 1)
                of_stage = _reinterpret(ring.index(at), WORD, down.block_shape, DOWN_TILE)
                rows = ()
                for i in gl.static_range(2):
                    rows += (of_stage.index(i).load(gl.DotOperandLayout(0, ACC, K_WIDTH)),)
                mbarrier.arrive(empty.index(at), count=1)
                turn += 1
                more = ()
                for i in gl.static_range(2):
                    product = _multiply_down(rows[i], inner)
                    if SHAPE.scales == "block":
                        of_tile = of_down.index(block * (SCALES // 2) + step * 2 + i)
                        product = _times_blocks(product, of_tile, units.index(g))
                    else:
                        product *= units.index(g).load(BY_COLUMN)[None, :]
                        if SHAPE.scales == "channel":
                            product *= scales[i][:, None]
                    if FIXED:
                        peak = gl.maximum(peak, _peak(product, peak))
                    more += (added[i] + product.to(added[i].dtype),)
                added = more
            scales = _row_scales(down_scales, step + 1, row, SHAPE)
            for i in gl.static_range(2):
                _add(outputs + (2 * step + i) * ROWS, added[i], summed)
        if FIXED:
            odd |= (gl.max(peak, 0) > _LARGEST_SHARE / _UNIT).to(gl.int32)
            gl.atomic_max(broken + of_column, odd, mask=real & (odd != 0), sem="relaxed")
        mask, tile = next_mask, next_tile
    return (arriving,)


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
    OPERAND: gl.constexpr = gl.float16 if SIZE == 1 else WORD
    TERMS: gl.constexpr = 2 if OPERAND.is_bf16() else 1
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8 * SIZE, rank=2)
    INNER: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(16 // SIZE, 1, 4 * SIZE, [1, 2, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()

    ring = gl.allocate_shared_memory(WORD, [STAGES, 4 * TUNING.slice, STEP], RING)
    inners = gl.allocate_shared_memory(OPERAND, [TUNING.run * TERMS, TUNING.slice, COLUMNS], INNER)
    units = gl.allocate_shared_memory(gl.float32, [TUNING.run, COLUMNS], FLAT)
    staged = gl.allocate_shared_memory(OPERAND, [HIDDEN // (2 * STEP), 2, STEP, COLUMNS], STAGED)
    runs = gl.allocate_shared_memory(gl.int32, [2, _RUN_SIZE], FLAT)
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
                    x, logits, correction, gate_up, gate_up_scale, down, down_scale, shared_gate_up_scale,
                    shared_down_scale, sums, broken, tokens, x_stride, logits_stride, runs, ring, posted, full, empty,
                    inners, units, staged, block_scales, SHAPE, TUNING, TOKENS, FIXED, GATED, ACTIVATION,
                ),
            ),
            (
                _fetch,
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
        finishers = gl.minimum(arriving, FINISHERS)
        # All warps have added before the counter says so; that also acquires what others have added.
        _barrier()
        ticket = gl.atomic_add(counters, 1, sem="acq_rel")
        if ticket >= arriving - finishers:
            if FINISHERS > 1:
                while gl.atomic_add(counters, 0, sem="acquire") < arriving:
                    pass
            number = ticket - (arriving - finishers)
            _finish(sums, broken, residual, out, tokens, factor, number, finishers, SHAPE, FIXED)
            _barrier()
            left = 0
            if FINISHERS > 1:
                left = gl.atomic_add(counters + 1, 1, sem="acq_rel")
            if left == finishers - 1:
                LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
                token = gl.arange(0, TOKENS, layout=LAYOUT)
                gl.store(broken + token, gl.zeros([TOKENS], gl.int32, layout=LAYOUT))
                gl.store(counters, 0)
                gl.store(counters + 1, 0)
