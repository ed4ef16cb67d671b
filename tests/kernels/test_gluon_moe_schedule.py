"""How the Gluon mixture of experts shares out its work: its plan, and functions of the kernel with plain numbers."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from subten.kernels.moe import gluon_schedule
from subten.kernels.moe.gluon_plan import fits, plan_gluon_moe, shape_refusal
from subten.kernels.moe.plan import MoEShape

range_of, run_at = gluon_schedule.range_of.fn, gluon_schedule.run_at.fn
LONGEST = 15

parts = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=6)
"""Of every expert its slices and its tiles of columns."""


def runs_of(parts: list[tuple[int, int]], program: int, programs: int, longest: int) -> list[tuple[int, ...]]:
    """Expert, tile of columns, first slice and length of each run of a program, one behind the other."""
    places = sum(slices * tiles for slices, tiles in parts)
    tiled = any(tiles > 1 for _, tiles in parts)
    start, end, length, busy = range_of(program, places, programs, tiled)
    assert (start < end) == (program < busy)
    place = start
    runs = []
    while place < end:
        expert, begin = next(
            (expert, begin)
            for expert, begin in enumerate(accumulate((a * b for a, b in parts), initial=0))
            if place < begin + parts[expert][0] * parts[expert][1]
        )
        slices, tiles = parts[expert]
        first, tile, count = run_at(place - begin, end - begin, length, tiles, slices, longest)
        runs.append((expert, tile, first, count))
        place += count
    assert place == end
    return runs


@given(parts, st.integers(1, 50), st.integers(1, LONGEST))
def test_every_slice_is_done_once_for_every_tile(parts: list, programs: int, longest: int) -> None:
    all_runs = [runs_of(parts, program, programs, longest) for program in range(programs)]
    done = Counter(
        (expert, tile, slice_)
        for runs in all_runs
        for expert, tile, first, count in runs
        for slice_ in range(first, first + count)
    )
    wanted = {
        (expert, tile, slice_)
        for expert, (slices, tiles) in enumerate(parts)
        for tile in range(tiles)
        for slice_ in range(slices)
    }
    assert set(done) == wanted
    assert set(done.values()) == {1}
    assert all(1 <= count <= longest for runs in all_runs for *_, count in runs)


@given(parts, st.integers(1, 50))
def test_no_program_has_more_than_its_share_rounded_up(parts: list, programs: int) -> None:
    places = sum(slices * tiles for slices, tiles in parts)
    work = [sum(count for *_, count in runs_of(parts, program, programs, LONGEST)) for program in range(programs)]
    assert max(work) == -(-places // programs)
    busy = [amount for amount in work if amount]
    assert work[: len(busy)] == busy
    if all(tiles == 1 for _, tiles in parts):
        assert len(busy) == min(places, programs)
        assert max(busy) - min(busy) <= 1
    else:
        assert set(busy[:-1]) <= {max(work)}


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 8), st.integers(1, LONGEST))
def test_the_tiles_of_an_expert_are_read_at_the_same_time(tiles: int, blocks: int, share: int, longest: int) -> None:
    """Its slices divide into ranges: the programs of one block are at the same slice all the time."""
    parts, programs = [(blocks * share, tiles)], blocks * tiles
    all_runs = [runs_of(parts, program, programs, longest) for program in range(programs)]
    for block in range(blocks):
        of_block = [[run[2:] for run in runs] for runs in all_runs[block * tiles : (block + 1) * tiles]]
        assert all(runs == others for runs, others in pairwise(of_block))


@given(
    st.integers(2, 14),
    st.integers(1, 64),
    st.integers(0, 64),
    st.integers(2, 512),
    st.integers(1, 64),
    st.sampled_from(["none", "channel", "block"]),
)
def test_there_is_a_plan_for_every_shape(
    hidden: int, slices: int, shared: int, experts: int, tokens: int, scales: str
) -> None:
    shape = MoEShape(512 * hidden, 64 * slices, experts, 2, True, "softmax", 1.0, scales, 64 * shared, 64)
    assert shape_refusal(shape.hidden, shape.intermediate, shape.shared) is None
    plan = plan_gluon_moe(shape, tokens, 132)
    assert fits(shape, plan.tuning)
    assert plan.tuning.run <= LONGEST
    assert 1 <= plan.programs <= 132
    assert 1 <= plan.finishers <= 66
