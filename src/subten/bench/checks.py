"""Whether a kernel computes what it should: asked before any of its times is told."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from subten.errors import NumericalError

ALLOWED = 2e-3
"""Relative error of an attention kernel over the cache, its result in fp16."""
ALLOWED_16_BIT = 1e-2
ALLOWED_FP8 = 1e-1
"""Of the peers: 16-bit operands and weights; FP8 operands and weights."""


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Euclidean norm of the difference over that of `expected`."""
    difference = (result.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def require(pairs: Sequence[tuple[Tensor, Tensor]], allowed: float) -> float:
    """Compare results with what was expected, and return the largest relative error.

    Raises:
        NumericalError: one differs by more than is allowed, or is not finite.
    """
    errors = [relative_error(result, expected) for result, expected in pairs]
    # NaN is no number below the limit either.
    wrong = [error for error in errors if not error <= allowed]
    if wrong:
        raise NumericalError(f"relative error {wrong[0]:.1e} against the torch reference; {allowed:.0e} is allowed")
    return max(errors)
