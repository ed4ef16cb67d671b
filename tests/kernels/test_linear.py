from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subten.checkpoints.fp8 import quantise_channels
from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.reference import linear_bytes, linear_flops, linear_reference


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(bias, dtype):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(9, 33, generator=generator), torch.randn(17, 33, generator=generator)
    added = torch.randn(17, generator=generator) if bias else None
    x, weight, added = (None if t is None else t.to(dtype) for t in (x, weight, added))
    result = linear_reference(x, LinearWeights(weight, added))
    assert result.dtype == dtype
    expected = x.double() @ weight.double().T + (added.double() if bias else 0)
    magnitude = x.double().abs() @ weight.double().abs().T + (added.double().abs() if bias else 0)
    # Float32 accumulation over 33 products, then one rounding to the dtype.
    bound = 34 * torch.finfo(torch.float32).eps * magnitude + torch.finfo(dtype).eps * expected.abs()
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_comes_before_and_behind(dtype):
    generator = torch.Generator().manual_seed(2)
    x, weight, norm = (torch.randn(*size, generator=generator).to(dtype) for size in ((9, 33), (17, 33), (33,)))
    residual, bias = torch.randn(9, 17, generator=generator).to(dtype), torch.randn(17, generator=generator).to(dtype)
    normed = torch.full_like(x, torch.nan)
    options = {"norm": NormWeights(norm, 1e-5), "normed": normed, "residual": residual, "factor": 0.3}
    result = linear_reference(x, LinearWeights(weight, bias), **options)
    expected = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    epsilon = torch.finfo(dtype).eps if dtype != torch.float64 else torch.finfo(torch.float32).eps
    torch.testing.assert_close(normed.double(), expected, rtol=epsilon, atol=1e-6)
    expected = residual.double() + 0.3 * (normed.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(result.double(), expected, rtol=4 * epsilon, atol=30 * epsilon)
    wide = linear_reference(x, LinearWeights(weight), factor=0.5, dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, (linear_reference(x, LinearWeights(weight)) * 0.5).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_in_fp8_are_exact_but_for_the_last_rounding(dtype):
    generator = torch.Generator().manual_seed(3)
    x, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((9, 33), (17,)))
    codes, scale = quantise_channels(torch.randn(17, 33, generator=generator))
    weights = LinearWeights(codes, bias, scale[:, 0])
    result = linear_reference(x, weights)
    assert result.dtype == dtype
    expected = x.double() @ (codes.double() * scale.double()).T + bias.double()
    torch.testing.assert_close(result.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(weights.wide(torch.float32), codes.float() * scale)


@pytest.mark.parametrize("bias", [False, True])
def test_costs(bias):
    x, weight = torch.zeros(5, 12, dtype=torch.bfloat16), torch.zeros(7, 12, dtype=torch.float16)
    added = torch.zeros(7, dtype=torch.float16)
    with FlopCounterMode(display=False) as counter:
        result = linear_reference(x, LinearWeights(weight.bfloat16()))
    assert linear_flops(5, 12, 7) == counter.get_total_flops()
    moved = x.nbytes + weight.nbytes + result.nbytes + (added.nbytes if bias else 0)
    assert linear_bytes(5, 12, 7, bias=bias) == moved


def test_bytes_of_weights_in_another_precision():
    assert linear_bytes(1, 100, 10, activation_itemsize=2, weight_itemsize=1) == 110 * 2 + 1000
