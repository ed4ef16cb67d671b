"""Who goes on: dominance, halving, shares."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from subten.agent.speculation.pruning import Standing, best, dominated, halved, shares

STANDINGS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 0.75, 1.0]), st.sampled_from([0.0, 1.0, 2.5])), min_size=1, max_size=8
).map(lambda pairs: [Standing(number, *pair) for number, pair in enumerate(pairs)])


@given(STANDINGS)
def test_dominated_by_somebody_better_who_is_not_dominated(standings: list[Standing]) -> None:
    found = dominated(standings)
    for branch, by in found.items():
        mine, other = standings[branch], standings[by]
        assert by not in found
        assert other.score >= mine.score
        assert other.cost <= mine.cost


@given(STANDINGS)
def test_the_best_one_is_never_dominated(standings: list[Standing]) -> None:
    assert best(standings, 1)[0] not in dominated(standings)


@given(STANDINGS)
def test_among_those_left_a_better_score_costs_more(standings: list[Standing]) -> None:
    gone = dominated(standings)
    left = sorted((s for s in standings if s.branch not in gone), key=lambda s: s.score)
    assert all(a.score < b.score and a.cost < b.cost for a, b in pairwise(left))


@given(STANDINGS, st.integers(1, 9))
def test_best(standings: list[Standing], keep: int) -> None:
    kept = best(standings, keep)
    assert len(kept) == min(keep, len(standings))
    worst = min(standings[branch].score for branch in kept)
    assert all(s.score <= worst for s in standings if s.branch not in kept)


@given(st.integers(1, 64), st.integers(1, 9))
def test_halving(branches: int, rounds: int) -> None:
    assert 1 <= halved(branches, rounds) <= branches
    assert halved(branches, rounds) in (1, branches // 2**rounds)


@given(st.integers(1, 9), st.integers(1, 64))
def test_shares_are_even_and_sum_up(parents: int, branches: int) -> None:
    given_out = shares(parents, branches)
    assert sum(given_out) == branches
    assert len(given_out) == parents
    assert max(given_out) - min(given_out) <= 1
    assert given_out == sorted(given_out, reverse=True)
