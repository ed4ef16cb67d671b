"""Scales of FP8 weights: where those of a run are, and how they are loaded."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from subten.kernels.gluon_names import reinterpret
from subten.kernels.moe import gluon_plan
from subten.kernels.moe.gluon_plan import WARPS
from subten.kernels.moe.inputs import SCALE_BLOCK

# The plan makes them too, where Triton may not be installed.
blocks_of_run = gluon.constexpr_function(gluon_plan.blocks_of_run)
row_of_scales = gluon.constexpr_function(gluon_plan.row_of_scales)
_WARPS = gl.constexpr(WARPS)
_SCALE_BLOCK = gl.constexpr(SCALE_BLOCK)


@gluon.jit
def scales_of_run(run, scales, SHAPE: gl.constexpr):
    """Where the scales of a run's expert begin, those of gate and up and those of down, and how many rows gate has of
    them: one for each neuron, or for each block of these. Nothing for weights without scales."""
    shared, expert, _, _ = run
    gate_up, down, shared_gate_up, shared_down = scales
    of_run = ()
    if SHAPE.scales != "none":
        if SHAPE.scales == "channel":
            rows, shared_rows = SHAPE.intermediate, SHAPE.shared
            gate_up += expert.to(gl.int64) * (2 * rows)
            down += expert.to(gl.int64) * SHAPE.hidden
        else:
            rows, shared_rows = SHAPE.scale_blocks, SHAPE.shared_scale_blocks
            gate_up += expert.to(gl.int64) * (2 * rows * SHAPE.hidden_blocks)
            down += expert.to(gl.int64) * (rows * SHAPE.hidden_blocks)
        if SHAPE.shared > 0:
            rows = gl.where(shared != 0, shared_rows, rows)
            gate_up = gl.where(shared != 0, shared_gate_up, gate_up)
            down = gl.where(shared != 0, shared_down, down)
        of_run = (gate_up, down, rows)
    return of_run


@gluon.jit
def block_of(run, number, TUNING: gl.constexpr):
    """In which block of neurons the `number`-th slice of a run is, counted from that of the first."""
    neuron = run[2] * TUNING.slice
    return (neuron + number * TUNING.slice) // _SCALE_BLOCK - neuron // _SCALE_BLOCK


@gluon.jit
def load_block_scales(run, of_run, SHAPE: gl.constexpr, TUNING: gl.constexpr):
    """Of the blocks of neurons of a run, [blocks, rows of scales in shared memory]: of gate and up in the order of
    steps, 2 blocks of columns of gate, then of up; of down in that of its rows. Nothing if scales are no blocks'."""
    values = ()
    if SHAPE.scales == "block":
        BLOCKS: gl.constexpr = blocks_of_run(TUNING.run)
        SIZE: gl.constexpr = row_of_scales(SHAPE)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [_WARPS, 1], [1, 0])
        gate_up, down, rows = of_run
        neuron = run[2] * TUNING.slice
        first = neuron // _SCALE_BLOCK
        blocks = (neuron + run[3] * TUNING.slice - 1) // _SCALE_BLOCK + 1 - first
        block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        number = gl.arange(0, 2 * SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        of_columns, of_up = number // 4 * 2 + number % 2, number // 2 % 2
        row = first + block + of_up * rows
        wanted = (block < blocks) & (of_columns < SHAPE.hidden_blocks)
        gates = gl.load(gate_up + row * SHAPE.hidden_blocks + of_columns, mask=wanted, other=0.0)
        number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        wanted = (block < blocks) & (number < SHAPE.hidden_blocks)
        values = (gates, gl.load(down + number * rows + first + block, mask=wanted, other=0.0))
    return values


@gluon.jit
def stage_block_scales(staged, values):
    """Store what `load_block_scales` has loaded."""
    for i in gl.static_range(len(values)):
        staged[i].index(0).store(values[i])


@gluon.jit
def in_twos(staged):
    """Scales of blocks in shared memory, two at a time: as they belong to the two tiles of a pair of gate or up, or
    to the two blocks of rows of a tile of down."""
    TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(staged, staged.dtype, [staged.shape[1] * staged.shape[2] // 2, 2], TWO)


@gluon.jit
def row_scales(of_run, step, row, SHAPE: gl.constexpr):
    """Of channels: those of the rows of each tile of down of a step, beyond the last step those of the first."""
    ROWS: gl.constexpr = row.shape[0]
    STEPS: gl.constexpr = SHAPE.hidden // (2 * ROWS)
    of_tiles = ()
    for i in gl.static_range(2):
        if SHAPE.scales == "channel":
            of_tiles += (gl.load(of_run[1] + (step % STEPS * 2 + i) * ROWS + row),)
        else:
            of_tiles += (1.0,)
    return of_tiles
