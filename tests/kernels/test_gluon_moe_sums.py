"""The Gluon kernel's sums of rounded numbers, by its own functions on arrays instead of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from hypothesis import example, given
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from subten.kernels.moe import gluon_products
from subten.kernels.moe.gluon_plan import LONGEST_RUN

_LARGEST = float(gluon_products._LARGEST_SHARE.value / gluon_products.UNIT.value)
"""What a slice may add, in units of the sums."""


class _Tensor:
    """As much of a tensor as the functions use, with the arithmetic of its dtype."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> _Tensor:
        if isinstance(other, _Tensor):
            return _Tensor(operation(self.values, other.values))
        number = int(gl.constexpr(other).value) if self.values.dtype.kind == "i" else gl.constexpr(other).value
        return _Tensor(operation(self.values, np.array(number).astype(self.values.dtype)))

    def __add__(self, other: Any) -> _Tensor:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> _Tensor:
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> _Tensor:
        return self._with(other, operator.mul)

    def __lshift__(self, other: Any) -> _Tensor:
        return self._with(other, operator.lshift)

    def to(self, dtype: gl.dtype, bitcast: bool = False) -> _Tensor:
        target = np.dtype(dtype.name)
        return _Tensor(self.values.view(target) if bitcast else self.values.astype(target))


def _sum(numbers: list[float]) -> int:
    limbs = (_Tensor(np.zeros(1, np.int32)), _Tensor(np.zeros(1, np.int32)))
    with np.errstate(over="ignore"):
        for number in numbers:
            limbs = gluon_products._add_rounded.fn(limbs, _Tensor(np.array([number], np.float32)))
        return int(gluon_products._whole.fn(limbs, len(numbers)).values[0])


@given(st.lists(st.floats(-_LARGEST, _LARGEST, width=32), max_size=LONGEST_RUN))
@example([_LARGEST] * LONGEST_RUN)
@example([-_LARGEST] * LONGEST_RUN)
@example([2.0**22, -(2.0**22), 2.0**22 + 0.5, 0.5, -0.5, 1.5, 2.0**-140])
@example([])
def test_sums_of_a_run_are_those_of_the_nearest_whole_numbers(numbers: list[float]) -> None:
    assert _sum(numbers) == sum(round(number) for number in numbers)
