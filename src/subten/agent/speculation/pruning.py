"""Which branches go on. Pure functions of scores and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """Where a branch stands at the end of a round.

    Attributes:
        branch: its number.
        score: of the check, 0 to 1.
        cost: in seconds: of its sandbox, and what its tokens are counted as.
    """

    branch: int
    score: float
    cost: float


def dominated(standings: Sequence[Standing]) -> dict[int, int]:
    """Branches that another one equals or beats in score at a lower cost, and by which; the best of those.

    Of two that are equal in both the later one is dominated.
    """
    found = {}
    for mine in standings:
        better = [other for other in standings if _dominates(other, mine)]
        if better:
            found[mine.branch] = min(better, key=_rank).branch
    return found


def best(standings: Sequence[Standing], keep: int) -> list[int]:
    """The `keep` best: highest score first, then lowest cost, then the earlier one."""
    return [standing.branch for standing in sorted(standings, key=_rank)[:keep]]


def halved(branches: int, rounds: int) -> int:
    """How many branches are continued after so many rounds: half of `branches`, then half of that, at least one.

    As every round begins the same number of branches, what each of the continued ones gets doubles: successive
    halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification", 2016).
    """
    return max(1, branches >> rounds)


def shares(parents: int, branches: int) -> list[int]:
    """How many of the next round's branches each parent gets: as even as can be, the first ones more."""
    each, more = divmod(branches, parents)
    return [each + (index < more) for index in range(parents)]


def _dominates(one: Standing, other: Standing) -> bool:
    if one.branch == other.branch or one.score < other.score or one.cost > other.cost:
        return False
    return one.cost < other.cost or one.score > other.score or one.branch < other.branch


def _rank(standing: Standing) -> tuple[float, float, int]:
    return -standing.score, standing.cost, standing.branch
