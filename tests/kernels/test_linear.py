from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subten.kernels.linear import linear_bytes, linear_flops, linear_reference


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(bias, dtype):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(9, 33, generator=generator), torch.randn(17, 33, generator=generator)
    added = torch.randn(17, generator=generator) if bias else None
    x, weight, added = (None if t is None else t.to(dtype) for t in (x, weight, added))
    result = linear_reference(x, weight, added)
    assert result.dtype == dtype
    expected = x.double() @ weight.double().T + (added.double() if bias else 0)
    magnitude = x.double().abs() @ weight.double().abs().T + (added.double().abs() if bias else 0)
    # Float32 accumulation over 33 products, then one rounding to the dtype.
    bound = 34 * torch.finfo(torch.float32).eps * magnitude + torch.finfo(dtype).eps * expected.abs()
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bias", [False, True])
def test_costs(bias):
    x, weight = torch.zeros(5, 12, dtype=torch.bfloat16), torch.zeros(7, 12, dtype=torch.float16)
    added = torch.zeros(7, dtype=torch.float16)
    with FlopCounterMode(display=False) as counter:
        result = linear_reference(x, weight.bfloat16())
    assert linear_flops(5, 12, 7) == counter.get_total_flops()
    moved = x.nbytes + weight.nbytes + result.nbytes + (added.nbytes if bias else 0)
    assert linear_bytes(5, 12, 7, bias=bias) == moved


def test_bytes_of_weights_in_another_precision():
    assert linear_bytes(1, 100, 10, activation_itemsize=2, weight_itemsize=1) == 110 * 2 + 1000
