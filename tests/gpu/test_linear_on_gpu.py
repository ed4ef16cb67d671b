"""The linear layer for few tokens at full size against float64 on the same weights: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from subten.kernels.linear.plan import LinearShape
from subten.kernels.linear.triton_linear import TritonLinear, linear_many
from support.linear import error, exactly, layer, norm_of, normed_exactly, rows

pytestmark = pytest.mark.gpu

LINEAR = TritonLinear()
SIZES = [(5120, 2048), (2048, 4096), (129, 2048), (6144, 4096), (151_936, 2048), (1000, 528)]
EXACT = 1e-5
ROUNDED = 4e-3
"""Where tokens are rounded to bf16 behind the weight of a norm."""


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_against_float64_and_the_same_bits_in_any_batch(size: tuple[int, int], kind: str) -> None:
    outputs, inputs = size
    wide = torch.float16 if kind == "fp16" else torch.bfloat16
    weights = layer(outputs, inputs, kind, bias=outputs < 2000, device="cuda")
    x, norm = rows(64, inputs, wide, device="cuda"), norm_of(inputs, wide, device="cuda")
    residual = rows(64, outputs, wide, seed=4, device="cuda")
    plain = LINEAR(x, weights, dtype=torch.float32)
    assert error(plain, exactly(x, weights)) <= EXACT
    normed = torch.full_like(x, torch.nan)
    together = LINEAR(x, weights, norm=norm, normed=normed, dtype=torch.float32)
    assert error(together, exactly(x, weights, norm=norm)) <= ROUNDED
    assert error(normed, normed_exactly(x, norm)) <= ROUNDED
    added = LINEAR(x, weights, residual=residual, factor=0.25)
    assert added.dtype == wide
    assert error(added, exactly(x, weights, residual=residual, factor=0.25)) <= ROUNDED
    for count in (1, 2, 8, 9, 16, 17, 32, 33):
        assert torch.equal(LINEAR(x[-count:], weights, dtype=torch.float32), plain[-count:])
        assert torch.equal(LINEAR(x[-count:], weights, norm=norm, dtype=torch.float32), together[-count:])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_nan_stays_in_its_token(kind: str) -> None:
    weights, x, norm = (
        layer(5120, 2048, kind, device="cuda"),
        rows(20, 2048, device="cuda"),
        norm_of(2048, device="cuda"),
    )
    clean = LINEAR(x, weights, norm=norm)
    x[5, 100] = torch.nan
    found = LINEAR(x, weights, norm=norm)
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


def test_time_and_share_of_the_memory_bandwidth() -> None:
    """Printed (-s); what is asserted is only that nothing is absurdly slow."""
    cases = [(5120, 2048, 1, True), (5120, 2048, 8, True), (5120, 2048, 32, True), (2048, 4096, 1, False)]
    cases += [(2048, 4096, 8, False), (6144, 4096, 1, True), (6144, 4096, 8, True), (128, 2048, 8, True)]
    cases += [(151_936, 2048, 1, True), (151_936, 2048, 8, True), (151_936, 2048, 32, True)]
    print()
    for kind in ("fp8", "bf16"):
        for outputs, inputs, tokens, normalised in cases:
            first = layer(outputs, inputs, kind, device="cuda")
            copies = max(2, -(-(200 << 20) // first.weight.nbytes))
            layers = [
                first,
                *(layer(outputs, inputs, kind, seed=s, device="cuda") for s in range(1, min(copies, 24))),
            ]
            x, norm = rows(tokens, inputs, device="cuda"), norm_of(inputs, device="cuda") if normalised else None
            for weights in layers:
                LINEAR(x, weights, norm=norm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(4):
                    for weights in layers:
                        LINEAR(x, weights, norm=norm)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            times = []
            for _ in range(12):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1000 / (4 * len(layers)))
            taken = sorted(times)[len(times) // 2]
            rate = first.weight.nbytes / taken / 1e6
            tuning = LINEAR.tuning(LinearShape(inputs, outputs, first.weight.itemsize), tokens, x.device)
            before = "norm" if normalised else "    "
            print(
                f"{kind} {outputs:6} x {inputs} {before} {tokens:2} tokens: {taken:7.2f} us, {rate:5.2f} TB/s, "
                f"{tuning.rows} rows, {tuning.stages} stages"
            )
            assert taken < 20 + first.weight.nbytes / 1e6
