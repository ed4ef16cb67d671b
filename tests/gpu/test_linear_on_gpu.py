"""The linear layer for few tokens at full size against float64 on the same weights: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from subten.kernels.linear.gluon_linear import GluonLinear
from subten.kernels.linear.triton_linear import TritonLinear, linear_many
from subten.kernels.linear.triton_rows import norm_rows
from support.linear import error, exactly, layer, norm_of, normed_exactly, rows

pytestmark = pytest.mark.gpu

LINEARS = {"gluon": GluonLinear(), "triton": TritonLinear()}
SIZES = [(5120, 2048), (2048, 4096), (129, 2048), (8, 4096), (640, 512), (6144, 4096), (151_936, 2048), (1000, 528)]
EXACT = 1e-5
ROUNDED = 4e-3
"""Where tokens are rounded to bf16 behind the weight of a norm."""


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_against_float64_and_the_same_bits_in_any_batch(size: tuple[int, int], kind: str, name: str) -> None:
    (outputs, inputs), linear = size, LINEARS[name]
    wide = torch.float16 if kind == "fp16" else torch.bfloat16
    weights = layer(outputs, inputs, kind, bias=outputs < 2000, device="cuda")
    x, norm = rows(64, inputs, wide, device="cuda"), norm_of(inputs, wide, device="cuda")
    residual = rows(64, outputs, wide, seed=4, device="cuda")
    plain = linear(x, weights, dtype=torch.float32)
    assert error(plain, exactly(x, weights)) <= EXACT
    normed = torch.full_like(x, torch.nan)
    together = linear(x, weights, norm=norm, normed=normed, dtype=torch.float32)
    assert error(together, exactly(x, weights, norm=norm)) <= ROUNDED
    assert error(normed, normed_exactly(x, norm)) <= ROUNDED
    added = linear(x, weights, residual=residual, factor=0.25)
    assert added.dtype == wide
    assert error(added, exactly(x, weights, residual=residual, factor=0.25)) <= ROUNDED
    for count in (1, 2, 8, 9, 16, 17, 32, 33):
        assert torch.equal(linear(x[-count:], weights, dtype=torch.float32), plain[-count:])
        assert torch.equal(linear(x[-count:], weights, norm=norm, dtype=torch.float32), together[-count:])


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_nan_stays_in_its_token(kind: str, name: str) -> None:
    weights, x, norm = (
        layer(5120, 2048, kind, device="cuda"),
        rows(20, 2048, device="cuda"),
        norm_of(2048, device="cuda"),
    )
    clean = LINEARS[name](x, weights, norm=norm)
    x[5, 100] = torch.nan
    found = LINEARS[name](x, weights, norm=norm)
    assert found[5].isnan().all()
    others = [row for row in range(20) if row != 5]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_many_tokens(kind: str) -> None:
    weights, x, norm = (
        layer(5120, 2048, kind, device="cuda"),
        rows(300, 2048, device="cuda"),
        norm_of(2048, device="cuda"),
    )
    assert error(linear_many(x, weights, norm=norm), exactly(x, weights, norm=norm)) <= 2 * ROUNDED
    normed, residual = torch.empty_like(x), rows(300, 5120, device="cuda", seed=9)
    options = {"residual": residual, "factor": 0.5}
    found = linear_many(x, weights, norm=norm, normed=normed, dtype=torch.float32, **options).double()
    expected = exactly(x, weights, norm=norm, **options)
    assert error(found - residual.double(), expected - residual.double()) <= 2 * ROUNDED
    assert error(normed, normed_exactly(x, norm)) <= ROUNDED
    for some in (slice(0, 1), slice(7, 100)):
        assert torch.equal(norm_rows(x[some], norm, torch.empty_like(x[some])), normed[some])
