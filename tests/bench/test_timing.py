from __future__ import annotations

import pytest

from subten.bench.timing import Timing, copies_past


def test_median_and_percentiles() -> None:
    timing = Timing.of([float(x) for x in (5, 1, 9, 3, 7, 11, 2, 10, 4, 8, 6)])
    assert timing == Timing(us=6.0, us_p10=2.0, us_p90=10.0, replays=11)


@pytest.mark.parametrize(("nbytes", "copies"), [(60, 2), (1000, 2), (59, 3), (10, 12), (11, 11), (1, 120)])
def test_copies_are_twice_the_cache_and_never_one(nbytes: int, copies: int) -> None:
    assert copies_past(60, nbytes) == copies


def test_copies_have_an_upper_end() -> None:
    assert copies_past(60_000_000, 1000) == 160
