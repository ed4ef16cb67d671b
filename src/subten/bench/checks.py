"""Whether a kernel computes what it should: asked before any of its times is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from subten.bench.machine import first_line, require_sound_device
from subten.errors import NumericalError, SubtenError

_T = TypeVar("_T")

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


def attempt(measure: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """What was measured, or the reason why there is none.

    Raises:
        KernelUnavailableError: the device does not work any more.
    """
    try:
        return measure(), None
    except SubtenError as refusal:
        return None, str(refusal)
    except Exception as failure:  # whatever a compiler or a driver raises: the other rows are still wanted
        require_sound_device(failure)
        return None, f"{type(failure).__name__}: {first_line(failure)}"
