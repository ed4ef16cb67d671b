from __future__ import annotations

import pytest
import torch

from subten.kernels.norm import rms_norm_bytes, rms_norm_flops, rms_norm_reference


def exact(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 96), (3, 4, 64), (0, 16)])
def test_equals_the_definition_but_for_one_rounding(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)
    result = rms_norm_reference(x, weight, 1e-5)
    assert result.dtype == dtype
    assert result.shape == x.shape
    # The arithmetic, float32 or better, adds a few roundings to the final one.
    inner = torch.promote_types(dtype, torch.float32)
    tolerance = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(inner).eps
    torch.testing.assert_close(result.double(), exact(x, weight, 1e-5), rtol=tolerance, atol=0)


def test_half_precision_inputs_do_not_overflow_in_the_mean_square():
    x = torch.full((1, 4), 60_000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm_reference(x, torch.ones(4, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_a_nan_stays_in_its_row():
    x = torch.ones(3, 4)
    x[1, 2] = torch.nan
    result = rms_norm_reference(x, torch.ones(4), 1e-6)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_costs():
    x, weight = torch.zeros(7, 12, dtype=torch.bfloat16), torch.zeros(12, dtype=torch.bfloat16)
    result = rms_norm_reference(x, weight, 1e-6)
    assert rms_norm_bytes(7, 12, 2) == x.nbytes + weight.nbytes + result.nbytes
    # Per element: square, sum, scale, weight. Per row: divide by the width, add eps, reciprocal root.
    assert rms_norm_flops(7, 12) == 7 * (4 * 12 + 3)
