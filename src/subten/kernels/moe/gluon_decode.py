"""A mixture of experts for 1 to 64 tokens in one launch on sm_90, in Gluon: Triton with layouts by hand.

The work is that of triton_decode.py, which serves other GPUs and is the one to read first. What differs is how
weights reach a program: as one stream of tiles of 16 KiB through a ring in shared memory. The copy engine fills it
ahead of the work, across the end of gate and up, of down, and of an item.
docs/kernels/moe.md has the reasons and the measurements.

- An item is one or several slices of 64 neurons of an expert, for as many of its tokens as a tile has columns.
- A slice's rows of gate and of up are a tile each; the four warps have 16 rows of both, so that a thread holds gate
  and up of the same neurons.
- Down lies in slices of 64 columns, one behind the other (`packing.cut_down`): a tile is 256 rows of a slice.
- Products of the slices of an item are added up as 64-bit integers, as they are in memory: how many slices make an
  item does not change a bit.
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

from subten.kernels.attention.gluon_ptx import let_next_kernel_start, wait_for_previous_kernel
from subten.kernels.moe import triton_decode
from subten.kernels.moe.gluon_plan import LINE, GluonMoEPlan, plan_gluon_moe
from subten.kernels.moe.gluon_routing import columns_of, locate, route, shares_of, tiles_of_experts
from subten.kernels.moe.gluon_schedule import length_of_ranges, reciprocal_of, rows_and_slice, run_at
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
_SCALE_BLOCK = gl.constexpr(SCALE_BLOCK)
_UNIT = gl.constexpr(2.0**-32)
"""Of the sums: a token whose outputs are as small as 1e-3 still gets them to 2e-7."""
_LARGEST_SHARE = gl.constexpr(2.0**18)
"""What an item may add to an output; 2^13 of these fit. A token with larger ones becomes NaN, not something wrong."""
_INFINITY = gl.constexpr(0x7F800000)


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
        num_warps=plan.tuning.warps,
        maxnreg=plan.tuning.registers,
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
        "down": _down_tiles(weights.down, width, plan.tuning.down_tiles),
        "shared_gate_up": shared and _gate_up_tiles(shared.gate_up, width),
        "shared_down": shared and _down_tiles(shared.down, width, plan.tuning.down_tiles),
    }


def _gate_up_tiles(weight: Tensor, width: int) -> TensorDescriptor:
    """Gate and up of all experts, [2 * experts, lines, neurons, line]: a pair of tiles is two lines of every row of a
    slice, gate in front of up."""
    *experts, rows, hidden = weight.shape
    line = LINE // weight.itemsize
    lines = weight.view(2 * math.prod(experts), rows // 2, hidden // line, line)
    return _tiles(lines.transpose(1, 2), [2, 2, width, line])


def _down_tiles(weight: Tensor, width: int, count: int) -> TensorDescriptor:
    """The slices of down of all experts one below the other: tiles of them are one piece of memory."""
    rows = 2 * LINE // weight.itemsize
    return _tiles(weight.view(-1, rows, width), [count, rows, width])


def _tiles(weight: Tensor, size: list[int]) -> TensorDescriptor:
    # The copy engine knows no FP8.
    plain = weight.view(torch.uint8) if weight.itemsize == 1 else weight
    line = size[-1] * weight.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=line, element_bitwidth=8 * weight.itemsize, rank=len(size))
    return TensorDescriptor.from_tensor(plain, size, layout)


# --- the stream of tiles -----------------------------------------------------------------------------------------


@gluon.jit
def _copy_gate_up(weights, expert, neuron, step, stage, bar, SHAPE: gl.constexpr):
    SLICE: gl.constexpr = weights.block_shape[2]
    STEPS: gl.constexpr = SHAPE.hidden // (2 * weights.block_shape[3])
    corner = [2 * expert, step % STEPS * 2, neuron + step // STEPS * SLICE, 0]
    _copy(weights, corner, bar, _reinterpret(stage, weights.dtype, weights.block_shape, weights.layout))


@gluon.jit
def _copy_down(weights, first, step, slices, reciprocal, stage, bar, SHAPE: gl.constexpr):
    COUNT: gl.constexpr = weights.block_shape[0]
    rows, member = rows_and_slice(step, slices, reciprocal)
    corner = [(first + member) * (SHAPE.hidden // weights.block_shape[1]) + COUNT * rows, 0, 0]
    _copy(weights, corner, bar, _reinterpret(stage, weights.dtype, weights.block_shape, weights.layout))


@gluon.jit
def _request(
    step, turn, here, following, has_next, weights, ring, bars, SHAPE: gl.constexpr, TUNING: gl.constexpr
):  # fmt: skip
    """Ask for a pair of tiles: the `step`-th of a run, or of gate and up of the run behind it. `turn` counts the
    pairs of a program, and `here` and `following` are what `_run` returned."""
    gate_up, down, shared_gate_up, shared_down = weights
    shared, expert, neuron, down_slice, slices, reciprocal = here
    next_shared, next_expert, next_neuron, _, _, _ = following
    first = slices * (SHAPE.hidden // (2 * gate_up.block_shape[3]))
    all = first + slices * (SHAPE.hidden // (down.block_shape[0] * down.block_shape[1]))
    stage = ring.index(turn % TUNING.stages)
    bar = bars.index(turn % TUNING.stages)
    beyond = step >= all
    if (step < all) | has_next:
        if (step < first) | beyond:
            mbarrier.expect(bar, TUNING.stage_bytes)
            of_expert, of_neuron = gl.where(beyond, next_expert, expert), gl.where(beyond, next_neuron, neuron)
            at = gl.where(beyond, step - all, step)
            if SHAPE.shared > 0:
                if gl.where(beyond, next_shared, shared) != 0:
                    _copy_gate_up(shared_gate_up, of_expert, of_neuron, at, stage, bar, SHAPE)
                else:
                    _copy_gate_up(gate_up, of_expert, of_neuron, at, stage, bar, SHAPE)
            else:
                _copy_gate_up(gate_up, of_expert, of_neuron, at, stage, bar, SHAPE)
        else:
            mbarrier.expect(bar, TUNING.stage_bytes // 2 * TUNING.down_tiles)
            if SHAPE.shared > 0:
                if shared != 0:
                    _copy_down(shared_down, down_slice, step - first, slices, reciprocal, stage, bar, SHAPE)
                else:
                    _copy_down(down, down_slice, step - first, slices, reciprocal, stage, bar, SHAPE)
            else:
                _copy_down(down, down_slice, step - first, slices, reciprocal, stage, bar, SHAPE)


@gluon.jit
def _take(
    step, turn, here, following, has_next, weights, ring, bars, SHAPE: gl.constexpr, TUNING: gl.constexpr
):  # fmt: skip
    """Wait for a pair of tiles, ask for the one that takes the place of the one before, and return where it is."""
    AHEAD: gl.constexpr = TUNING.stages - 1
    mbarrier.wait(bars.index(turn % TUNING.stages), (turn // TUNING.stages) & 1)
    _request(step + AHEAD, turn + AHEAD, here, following, has_next, weights, ring, bars, SHAPE, TUNING)
    return ring.index(turn % TUNING.stages)


# --- runs --------------------------------------------------------------------------------------------------------


@gluon.jit
def _run(
    place, end, block, tokens, masks, tiles, first_tile, shared_places, SHAPE: gl.constexpr, TUNING: gl.constexpr
):  # fmt: skip
    """The run that begins at a place of the list. Where its weights are (whether of the shared expert, which expert,
    the first neuron, the first slice of down, how many slices, and the reciprocal of that), the expert's tokens as
    bits, and which tile of columns it is for."""
    SLICES: gl.constexpr = SHAPE.intermediate // TUNING.slice
    expert, mask, of_expert, begin = locate(
        place - shared_places, masks, tiles, first_tile, SLICES, SHAPE.padded_experts
    )
    begin += shared_places
    shared, slices = 0, SLICES
    if SHAPE.shared > 0:
        tiles_of_all = (tokens + TUNING.columns - 1) // TUNING.columns
        if place < shared_places:
            shared, expert, of_expert, begin, slices = 1, 0, tiles_of_all, 0, SHAPE.shared // TUNING.slice
            # All bits up to the last token; in two steps, as there can be as many as there are bits.
            one = gl.sum(masks * 0, 0) + 1
            mask = ((one << (tokens - 1).to(masks.dtype)) - 1) * 2 + 1
    first, tile, length = run_at(place - begin, end - begin, block, of_expert, slices, TUNING.run)
    where = (shared, expert, first * TUNING.slice, expert * SLICES + first, length, reciprocal_of(length))
    return where, mask, tile


@gluon.jit
def _stage_tokens(x, x_stride, mask, tile, staged, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """The tokens of a tile of columns, in shared memory, as the tensor core takes them."""
    STEPS: gl.constexpr = staged.shape[0]
    STEP: gl.constexpr = staged.shape[2]
    COLUMNS: gl.constexpr = staged.shape[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, STEP // 8, 256 // STEP], [2, 1, WARPS // 2], [1, 2, 0])
    column, real = columns_of(mask, tile, TOKENS, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None] * STEP
    sources = x + column[None, None, :] * x_stride + half + k
    values = ()
    for step in gl.static_range(STEPS):
        values += (gl.load(sources + step * 2 * STEP, mask=real[None, None, :], other=0.0),)
    for step in gl.static_range(STEPS):
        staged.index(step).store(_as_operand(values[step], staged.dtype))


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
def _gate_up_scales(
    scales, neuron, slices, scale_blocks, step, STEP: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr,
    TUNING: gl.constexpr,
):  # fmt: skip
    """Of the blocks that a step's tiles of gate lie in, and of those of up."""
    gate, up = 1.0, 1.0
    if SHAPE.scales == "block":
        STEPS: gl.constexpr = SHAPE.hidden // (2 * STEP)
        block = (neuron + gl.minimum(step // STEPS, slices - 1) * TUNING.slice) // _SCALE_BLOCK
        tile = step % STEPS * 2 + gl.arange(0, 2, layout=LAYOUT)
        at = tile * STEP // _SCALE_BLOCK
        gate = gl.load(scales + (block * SHAPE.hidden_blocks + at))
        up = gl.load(scales + ((scale_blocks + block) * SHAPE.hidden_blocks + at))
    return gate, up


@gluon.jit
def _down_scales(
    scales, neuron, slices, reciprocal, scale_blocks, step, row, SHAPE: gl.constexpr, TUNING: gl.constexpr
):  # fmt: skip
    """Of the rows of each of a step's tiles of down."""
    ROWS: gl.constexpr = row.shape[0]
    COUNT: gl.constexpr = TUNING.down_tiles
    STEPS: gl.constexpr = SHAPE.hidden // (COUNT * ROWS)
    rows, member = rows_and_slice(step, slices, reciprocal)
    of_tiles = ()
    for i in gl.static_range(COUNT):
        at = (rows % STEPS * COUNT + i) * ROWS + row
        if SHAPE.scales == "none":
            of_tiles += (1.0,)
        elif SHAPE.scales == "channel":
            of_tiles += (gl.load(scales + at),)
        else:
            block = (neuron + member * TUNING.slice) // _SCALE_BLOCK
            of_tiles += (gl.load(scales + (at // _SCALE_BLOCK * scale_blocks + block)),)
    return of_tiles


@gluon.jit
def _multiply_gate_up(tile, values, scale, total, SHAPE: gl.constexpr):
    """A step of the sums of gate or of up, those of both tiles."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, values.type.layout.k_width)
    rows = _wide(tile.load(LEFT), values.dtype)
    if SHAPE.scales == "block":
        return total + mma_v2(rows, values, gl.zeros_like(total)) * scale[:, None, None]
    else:
        return mma_v2(rows, values, total)


@gluon.jit
def _multiply_down(tile, inners, share, member, scale, TERMS: gl.constexpr, ACC: gl.constexpr, SHAPE: gl.constexpr):
    """What a tile adds to the outputs of its rows."""
    K_WIDTH: gl.constexpr = 4 // (tile.dtype.primitive_bitwidth // 8)
    rows = _wide(tile.load(gl.DotOperandLayout(0, ACC, K_WIDTH)), inners.dtype)
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = inners.shape[2]
    product = gl.zeros([ROWS, COLUMNS], gl.float32, layout=ACC)
    for term in gl.static_range(TERMS):
        inner = inners.index(member * TERMS + term).load(gl.DotOperandLayout(1, ACC, K_WIDTH))
        product = mma_v2(rows, inner, product)
    if SHAPE.scales != "none":
        product *= scale[:, None]
    return product * share[None, :]


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
def _finish(
    sums, broken, residual, out, tokens, factor, number, finishers, SHAPE: gl.constexpr, TUNING: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """Turn every `finishers`-th block of sums, from `number` on, into output, and clear it. Every thread clears what
    it has read: the layout is one."""
    BLOCK: gl.constexpr = 512
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [TUNING.warps], [0])
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


@gluon.jit(do_not_specialize=["tokens"])
def moe_kernel(
    x, logits, correction, gate_up, gate_up_scale, down, down_scale, shared_gate_up, shared_gate_up_scale,
    shared_down, shared_down_scale, sums, broken, counters, residual, out, tokens, x_stride, logits_stride, factor,
    SHAPE: gl.constexpr, TUNING: gl.constexpr, TOKENS: gl.constexpr, FINISHERS: gl.constexpr, FIXED: gl.constexpr,
    GATED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. The shared expert's part of the list comes first, then those of visited ones."""
    HIDDEN: gl.constexpr = SHAPE.hidden
    SLICE: gl.constexpr = TUNING.slice
    WARPS: gl.constexpr = TUNING.warps
    COLUMNS: gl.constexpr = TUNING.columns
    STAGES: gl.constexpr = TUNING.stages
    WORD: gl.constexpr = gate_up.dtype
    SIZE: gl.constexpr = WORD.primitive_bitwidth // 8
    STEP: gl.constexpr = gate_up.block_shape[3]
    STEPS: gl.constexpr = HIDDEN // (2 * STEP)
    ROWS: gl.constexpr = down.block_shape[1]
    COUNT: gl.constexpr = down.block_shape[0]
    OPERAND: gl.constexpr = gl.float16 if SIZE == 1 else WORD
    TERMS: gl.constexpr = 2 if OPERAND.is_bf16() else 1
    K_WIDTH: gl.constexpr = 4 // SIZE
    # Gate and up: [tile of the pair, neuron, token]. Four warps have 16 neurons each, of both tiles, or eight of one.
    PAIR: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS // 4, 4, 1], instr_shape=[1, 16, 8]
    )
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PAIR, K_WIDTH)
    RIGHT_TILE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, RIGHT))
    RIGHT_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, RIGHT))
    RIGHT_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))
    OF_TILE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PAIR))
    # Their sums, and down: [neuron or row, token].
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8 * SIZE, rank=2)
    GATE_UP_PAIR: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8 * SIZE, rank=3)
    DOWN_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SLICE * SIZE, element_bitwidth=8 * SIZE, rank=2)
    INNER: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(4 * K_WIDTH, 1, 16 // K_WIDTH, [1, 2, 0])

    ring = gl.allocate_shared_memory(WORD, [STAGES, 4 * SLICE, STEP], RING)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    inners = gl.allocate_shared_memory(OPERAND, [TUNING.run * TERMS, SLICE, COLUMNS], INNER)
    units = gl.allocate_shared_memory(gl.float32, [TUNING.run, COLUMNS], FLAT)
    if TUNING.staged:
        staged = gl.allocate_shared_memory(OPERAND, [STEPS, 2, STEP, COLUMNS], STAGED)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    wait_for_previous_kernel()
    let_next_kernel_start()

    masks, top, divisor = route(logits, correction, tokens, logits_stride, SHAPE, TOKENS, WARPS)
    tiles, first_tile = tiles_of_experts(masks, COLUMNS)
    shared_places = SHAPE.shared // SLICE * ((tokens + COLUMNS - 1) // COLUMNS)
    places = shared_places + gl.sum(tiles, 0) * (SHAPE.intermediate // SLICE)
    length = length_of_ranges(places, gl.num_programs(0))
    place = gl.program_id(0) * length
    end = gl.minimum(place + length, places)
    weights = (gate_up, down, shared_gate_up, shared_down)
    if place < end:
        here, mask, tile = _run(place, end, length, tokens, masks, tiles, first_tile, shared_places, SHAPE, TUNING)
        for i in gl.static_range(STAGES - 1):
            _request(i, i, here, here, False, weights, ring, bars, SHAPE, TUNING)
        turn = 0
        while place < end:
            shared, expert, neuron, _, slices, reciprocal = here
            place += slices
            has_next = place < end
            following, next_mask, next_tile = _run(
                gl.minimum(place, end - 1),
                end,
                length,
                tokens,
                masks,
                tiles,
                first_tile,
                shared_places,
                SHAPE,
                TUNING,
            )
            of_operand, has_operand = columns_of(mask, tile, TOKENS, COLUMNS, RIGHT_COLUMN)
            of_column, real = columns_of(mask, tile, TOKENS, COLUMNS, BY_COLUMN)
            share = gl.full([COLUMNS], 1.0, gl.float32, layout=BY_COLUMN)
            if shared != 0:
                if GATED:
                    gate_logit = gl.load(
                        logits + of_column * logits_stride + SHAPE.num_experts, mask=real, other=0.0
                    ).to(gl.float32)
                    share = 1 / (1 + gl.exp2(gate_logit * -_LOG2_E))
            else:
                share = shares_of(logits, expert, of_column, real, logits_stride, top, divisor, SHAPE)
            odd = ((share.to(gl.int32, bitcast=True) & _INFINITY) == _INFINITY).to(gl.int32)
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

            # Gate and up, slice by slice. What does not come through the ring is loaded as soon as the registers are
            # free: nothing waits for it before the next step, not even to be moved.
            k = (
                gl.arange(0, STEP, layout=RIGHT_ROW)[None, :, None]
                + gl.arange(0, 2, layout=RIGHT_TILE)[:, None, None] * STEP
            )
            sources = x + of_operand[None, None, :] * x_stride + k
            there = has_operand[None, None, :]
            if TUNING.staged:
                _stage_tokens(x, x_stride, mask, tile, staged, TOKENS, WARPS)
            else:
                values = gl.load(sources, mask=there, other=0.0)
            gate_scale, up_scale = _gate_up_scales(
                gate_scales, neuron, slices, scale_blocks, 0, STEP, OF_TILE, SHAPE, TUNING
            )
            step = 0
            for g in range(slices):
                gates = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
                ups = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
                for _ in range(STEPS):
                    stage = _take(step, turn, here, following, has_next, weights, ring, bars, SHAPE, TUNING)
                    pair = _reinterpret(stage, WORD, [2, 2, SLICE, STEP], GATE_UP_PAIR)
                    operand = staged.index(step % STEPS).load(RIGHT) if TUNING.staged else _as_operand(values, OPERAND)
                    gates = _multiply_gate_up(pair.index(0), operand, gate_scale, gates, SHAPE)
                    ups = _multiply_gate_up(pair.index(1), operand, up_scale, ups, SHAPE)
                    step += 1
                    turn += 1
                    if not TUNING.staged:
                        values = gl.load(sources + step % STEPS * (2 * STEP), mask=there, other=0.0)
                    gate_scale, up_scale = _gate_up_scales(
                        gate_scales, neuron, slices, scale_blocks, step, STEP, OF_TILE, SHAPE, TUNING
                    )
                gate = gl.convert_layout(gl.sum(gates, 0), ACC)
                up = gl.convert_layout(gl.sum(ups, 0), ACC)
                if SHAPE.scales == "channel":
                    row = neuron + g * SLICE + gl.arange(0, SLICE, layout=BY_ROW)
                    gate *= gl.load(gate_scales + row)[:, None]
                    up *= gl.load(gate_scales + width + row)[:, None]
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
            peak = gl.zeros([16 * WARPS, COLUMNS], gl.float32, layout=ACC)
            scales = _down_scales(down_scales, neuron, slices, reciprocal, scale_blocks, 0, row, SHAPE, TUNING)
            at = 0
            for start in range(0, HIDDEN, COUNT * ROWS):
                added = ()
                for i in gl.static_range(COUNT):
                    added += (gl.zeros([ROWS, COLUMNS], sums.dtype.element_ty, layout=ACC),)
                for g in range(slices):
                    stage = _take(step, turn, here, following, has_next, weights, ring, bars, SHAPE, TUNING)
                    of_stage = _reinterpret(stage, WORD, down.block_shape, DOWN_TILE)
                    of_slice = units.index(g).load(BY_COLUMN)
                    more = ()
                    for i in gl.static_range(COUNT):
                        product = _multiply_down(of_stage.index(i), inners, of_slice, g, scales[i], TERMS, ACC, SHAPE)
                        if FIXED:
                            peak = gl.maximum(peak, _peak(product, peak))
                        more += (added[i] + product.to(added[i].dtype),)
                    added = more
                    at += 1
                    step += 1
                    turn += 1
                    scales = _down_scales(
                        down_scales, neuron, slices, reciprocal, scale_blocks, at, row, SHAPE, TUNING
                    )
                for i in gl.static_range(COUNT):
                    gl.atomic_add(outputs + (start + i * ROWS), added[i], mask=summed[None, :], sem="relaxed")
            if FIXED:
                odd |= (gl.max(peak, 0) > _LARGEST_SHARE / _UNIT).to(gl.int32)
                gl.atomic_max(broken + of_column, odd, mask=real & (odd != 0), sem="relaxed")
            here, mask, tile = following, next_mask, next_tile

    arriving = (places + length - 1) // length
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
            _finish(sums, broken, residual, out, tokens, factor, number, finishers, SHAPE, TUNING, FIXED)
            _barrier()
            if gl.atomic_add(counters + 1, 1, sem="acq_rel") == finishers - 1:
                LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
                token = gl.arange(0, TOKENS, layout=LAYOUT)
                gl.store(broken + token, gl.zeros([TOKENS], gl.int32, layout=LAYOUT))
                gl.store(counters, 0)
                gl.store(counters + 1, 0)
