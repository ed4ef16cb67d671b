from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.evals.metrics import (
    Estimate,
    common_prefix,
    compare,
    mean,
    perplexity,
    perplexity_increase,
    proportion,
    student_t,
)


def logits_of(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@given(rows=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_comparison_is_the_definition_at_every_position(rows: int, seed: int) -> None:
    vocab = 17
    reference, tested = logits_of(rows, vocab, seed), logits_of(rows, vocab, seed + 1)
    following = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    result = compare(reference, tested, following)
    for row in {0, rows // 2, rows - 1}:
        p = [math.exp(x) for x in reference[row].tolist()]
        q = [math.exp(x) for x in tested[row].tolist()]
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        token = int(following[row])
        assert result.nll[row].item() == pytest.approx(-math.log(q[token]))
        assert result.nll_16bit[row].item() == pytest.approx(-math.log(p[token]))
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert result.kld[row].item() == pytest.approx(divergence, abs=1e-12)
        assert result.same_top[row].item() == (p.index(max(p)) == q.index(max(q)))
    assert (result.kld >= 0).all()


def test_a_run_compared_with_itself_is_exactly_unchanged() -> None:
    logits = logits_of(100, 50, seed=3)
    result = compare(logits, logits, logits.argmin(-1))
    assert torch.equal(result.nll, result.nll_16bit)
    assert (result.kld == 0).all()
    assert result.same_top.all()


def test_large_logits_neither_overflow_nor_lose_their_shift() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    result = compare(logits, logits + 5, torch.tensor([1]))
    assert result.nll.item() == pytest.approx(1 + math.log(1 + math.exp(-1)), rel=1e-9)
    assert result.kld.item() == pytest.approx(0, abs=1e-9)


def test_uniform_predictions_have_the_vocabulary_as_perplexity() -> None:
    result = compare(torch.zeros(8, 40), torch.zeros(8, 40), torch.arange(8))
    estimate = perplexity([result.nll.mean().item()] * 3)
    assert estimate.value == pytest.approx(40)
    assert (estimate.low, estimate.high) == pytest.approx((40, 40))


def test_one_window_gives_no_interval() -> None:
    assert mean([2.5]) == Estimate(2.5, None, None)
    assert perplexity([0.0]) == Estimate(1.0, None, None)
    assert perplexity_increase([1.0], [1.0]) == Estimate(0.0, None, None)


def test_the_increase_is_a_fraction_and_pairing_cancels_what_windows_share() -> None:
    hard_and_easy = [1.0, 5.0, 3.0, 2.0]
    estimate = perplexity_increase([x + math.log(1.25) for x in hard_and_easy], hard_and_easy)
    assert estimate.value == pytest.approx(0.25)
    assert estimate.high == pytest.approx(0.25)
    unpaired = perplexity(hard_and_easy)
    assert unpaired.low is not None
    assert unpaired.high is not None
    assert unpaired.high / unpaired.low > 10


def test_a_destroyed_model_gives_infinity_instead_of_an_exception() -> None:
    estimate = perplexity_increase([900.0, 1.0], [1.0, 1.0])
    assert estimate.high == math.inf
    assert estimate.value == pytest.approx(math.exp(449.5))


@pytest.mark.parametrize("windows", [2, 3, 5, 20, 60])
def test_the_interval_covers_the_true_mean_as_often_as_it_says(windows: int) -> None:
    draw = random.Random(windows)
    trials = 3000
    covered = 0
    for _ in range(trials):
        estimate = mean([draw.gauss(1.0, 0.3) for _ in range(windows)])
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= 1.0 <= estimate.high
    # 4 standard errors of a proportion of 0.95.
    assert covered / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / trials))


@pytest.mark.parametrize("trials", [5, 20, 100])
@pytest.mark.parametrize("truth", [0.02, 0.3, 0.9])
def test_the_interval_of_a_share_covers_it_about_as_often_as_it_says(trials: int, truth: float) -> None:
    """Exactly, by adding up the binomial probabilities of the outcomes whose interval covers the truth."""
    covered = 0.0
    for hits in range(trials + 1):
        estimate = proportion([True] * hits + [False] * (trials - hits))
        assert estimate.value == hits / trials
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        assert estimate.high - estimate.low > 0
        if estimate.low <= truth <= estimate.high:
            covered += math.comb(trials, hits) * truth**hits * (1 - truth) ** (trials - hits)
    assert covered == pytest.approx(0.95, abs=0.05)


def test_the_interval_of_a_share_is_the_published_one() -> None:
    """Newcombe (1998), table I, method 3: 81 of 263, and 0 of 20."""
    share = proportion([True] * 81 + [False] * 182)
    assert (share.low, share.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none = proportion([False] * 20)
    assert (none.low, none.high) == pytest.approx((0, 0.1611), abs=5e-5)


def test_bounds_hold_for_value_and_interval() -> None:
    assert Estimate(0.5, -0.2, 1.2).within(0, 1) == Estimate(0.5, 0, 1)
    assert Estimate(-0.1, None, None).within(0, math.inf) == Estimate(0, None, None)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_a_common_prefix_is_common_and_ends_where_it_must(first: list[int], second: list[int]) -> None:
    n = common_prefix(first, second)
    assert first[:n] == second[:n]
    assert n == min(len(first), len(second)) or first[n] != second[n]


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (30, 2.042), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_quantiles_of_student_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=2e-4)
