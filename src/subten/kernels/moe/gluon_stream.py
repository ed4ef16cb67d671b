"""The stream of tiles of weights: the warp that asks the copy engine for them, and how the others take them.

The ring in shared memory has stages, of a pair of tiles each, and for every stage two barriers: `full`, when its
tiles have come, and `empty`, when all warps have read them. All three are a `pipe`. What is to be fetched is posted
by runs, of which gluon_decode.py says what they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from subten.kernels.gluon_names import copy, reinterpret
from subten.kernels.moe.gluon_plan import WARPS

_WARPS = gl.constexpr(WARPS)
RUN_SIZE = gl.constexpr(4)
"""Numbers that say what a run is."""


@gluon.jit
def _introduce(weights, ring, introduced, TUNING: gl.constexpr):
    """Have the copy engine read the descriptions of weights, which lie in memory and are kept from then on: it is
    asked for the pair of tiles in front of all there are, for which it reads nothing else and writes zeros."""
    mbarrier.expect(introduced, len(weights) * TUNING.stage_bytes)
    for i in gl.static_range(len(weights)):
        stage = _as_tiles(ring.index(i % 2), weights[i])
        copy(weights[i], [-stage.shape[0]] + [0] * (len(stage.shape) - 1), introduced, stage)
    mbarrier.wait(introduced, 0)


@gluon.jit
def fetch(
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
            copy(gate_up, [2 * expert, 2 * pair, member * TUNING.slice, 0], bar, _as_tiles(stage, gate_up))
            turn += 1
    begin = expert * (SHAPE.intermediate // TUNING.slice) + first
    for number in range(TILES // 2):
        rows = 2 * rows_at(number, first, TILES // 2)
        for member in range(begin, begin + slices):
            stage, bar = _free_stage(turn, pipe, TUNING)
            copy(down, [member * TILES + rows, 0, 0], bar, _as_tiles(stage, down))
            turn += 1
    return turn


@gluon.jit
def rows_at(number, first, STEPS: gl.constexpr):
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
def full_stage(turn, pipe, TUNING: gl.constexpr):
    """The next stage, when its tiles have come, and its place in the ring."""
    ring, full, _ = pipe
    place = turn % TUNING.stages
    mbarrier.wait(full.index(place), turn // TUNING.stages & 1)
    return ring.index(place), place


@gluon.jit
def give_back(place, pipe):
    """Say that a stage has been read, by all warps: the compiler puts a barrier in front."""
    _, _, empty = pipe
    mbarrier.arrive(empty.index(place), count=1)


@gluon.jit
def _as_tiles(stage, weights):
    """A stage of the ring as the copy engine fills it from `weights`."""
    return reinterpret(stage, weights.dtype, weights.block_shape, weights.layout)


@gluon.jit
def post_run(runs, posted, number, run):
    """Tell the warp that fetches tiles where those of a run are. There is room for two runs: tiles of the one before
    the last have come when this one is posted."""
    index = gl.arange(0, RUN_SIZE, layout=gl.BlockedLayout([1], [32], [_WARPS], [0]))
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
    numbers = reinterpret(runs, gl.int32, [2 * RUN_SIZE, 1], runs.layout)
    run = ()
    for i in gl.static_range(RUN_SIZE):
        run += (gl.sum(numbers.index(number % 2 * RUN_SIZE + i).load(LAYOUT), 0),)
    return run
