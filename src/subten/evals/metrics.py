"""What a changed cache does to a model's predictions, in numbers. Pure functions of logits.

Two runs over the same tokens are compared position by position: one with a 16-bit cache, one with the format in
question. Paired in this way, most of what makes one text harder than another drops out of the difference.

Intervals are 95% and come from the windows of the text, which are independent sequences to the model: Student's
t on the window means, carried through exp by the delta method (for the increase of perplexity on the *paired*
differences of log likelihood). Tokens within a window are not independent, so counting them would promise too
much; with few windows the interval is wide, with one there is none. Shares of independent trials have Wilson's
interval instead, which is not empty where all trials end alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

CONFIDENCE = 0.95

_ROWS_AT_A_TIME = 64
"""Bounds the memory for float64 log probabilities: 64 rows of a vocabulary of 150 000 are 77 MB."""

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom.
_STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.959964


@dataclass(frozen=True)
class Comparison:
    """Consecutive positions of one text seen by two runs; every tensor has shape [positions].

    Attributes:
        nll: float64, negative log likelihood of the token that follows, in nats, in the run under test.
        nll_16bit: the same in the 16-bit run.
        kld: float64, Kullback-Leibler divergence KL(16 bit || under test) of the two next-token distributions.
        same_top: bool, whether both find the same token most probable.
    """

    nll: Tensor
    nll_16bit: Tensor
    kld: Tensor
    same_top: Tensor


def compare(logits_16bit: Tensor, logits: Tensor, following: Tensor) -> Comparison:
    """Compare two runs at the same positions.

    Args:
        logits_16bit: float [positions, vocab] of the run with the 16-bit cache.
        logits: float [positions, vocab] of the run under test.
        following: int64 [positions], the token that really comes next.
    """
    blocks = zip(*(t.split(_ROWS_AT_A_TIME) for t in (logits_16bit, logits, following)), strict=True)
    parts = [_compare_block(*block) for block in blocks]
    return Comparison(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _compare_block(logits_16bit: Tensor, logits: Tensor, following: Tensor) -> tuple[Tensor, ...]:
    reference, tested = (x.double().log_softmax(-1) for x in (logits_16bit, logits))
    return (
        token_nll(tested, following),
        token_nll(reference, following),
        kl_divergence(reference, tested),
        reference.argmax(-1) == tested.argmax(-1),
    )


def token_nll(log_probabilities: Tensor, following: Tensor) -> Tensor:
    """Negative log likelihood [positions], in nats, of `following` under [positions, vocab]."""
    return -log_probabilities.gather(-1, following[:, None]).squeeze(-1)


def kl_divergence(reference: Tensor, tested: Tensor) -> Tensor:
    """KL(reference || tested) per row, in nats, of log probabilities [positions, vocab]."""
    return (reference.exp() * (reference - tested)).sum(-1)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval; `low` and `high` are None where one window gives no interval."""

    value: float
    low: float | None
    high: float | None

    def through(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the figure."""
        low = None if self.low is None else function(self.low)
        high = None if self.high is None else function(self.high)
        return Estimate(function(self.value), low, high)

    def within(self, lowest: float, highest: float) -> Estimate:
        """The estimate of a figure that can't be outside these bounds."""
        return self.through(lambda x: min(max(x, lowest), highest))


def mean(window_means: Sequence[float]) -> Estimate:
    """The mean over windows of equal length."""
    value = statistics.fmean(window_means)
    if len(window_means) < 2:
        return Estimate(value, None, None)
    error = statistics.stdev(window_means) / math.sqrt(len(window_means))
    margin = student_t(len(window_means) - 1) * error
    return Estimate(value, value - margin, value + margin)


def proportion(outcomes: Sequence[bool]) -> Estimate:
    """The share of independent trials that came out true (E. B. Wilson, JASA 22, 1927)."""
    trials, share = len(outcomes), statistics.fmean(outcomes)
    spread = _NORMAL**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    margin = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return Estimate(share, max(0.0, centre - margin), min(1.0, centre + margin))


def perplexity(window_nll: Sequence[float]) -> Estimate:
    """exp of the mean negative log likelihood, from its mean in each window."""
    return mean(window_nll).through(_exp)


def perplexity_increase(window_nll: Sequence[float], window_nll_16bit: Sequence[float]) -> Estimate:
    """Perplexity over 16-bit perplexity, minus 1 (a fraction: 0.25 is 25% more), from paired windows."""
    differences = [a - b for a, b in zip(window_nll, window_nll_16bit, strict=True)]
    return mean(differences).through(lambda x: _exp(x) - 1)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they differ or one ends."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def student_t(freedom: int) -> float:
    """97.5% quantile of Student's t; beyond 30 degrees of freedom from its Cornish-Fisher expansion."""
    if freedom <= len(_STUDENT_T):
        return _STUDENT_T[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _exp(x: float) -> float:
    """exp without an exception: a destroyed model may have an upper bound that no float can hold."""
    return math.exp(x) if x < 700 else math.inf
