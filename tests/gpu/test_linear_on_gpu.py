"""The linear layer for few tokens at full size against float64 on the same weights: `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.plan import LinearShape, LinearTuning
from subten.kernels.linear.triton_decode import linear_decode
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


CASES = [
    (5120, 2048, 1, True),
    (5120, 2048, 8, True),
    (5120, 2048, 16, True),
    (5120, 2048, 32, True),
    (2048, 4096, 1, False),
    (2048, 4096, 8, False),
    (2048, 4096, 32, False),
    (6144, 4096, 1, True),
    (6144, 4096, 8, True),
    (4096, 4096, 8, False),
    (128, 2048, 8, True),
    (151_936, 2048, 1, True),
    (151_936, 2048, 8, True),
    (151_936, 2048, 32, True),
]
"""Outputs, inputs, tokens, with a norm."""


def test_time_and_share_of_the_memory_bandwidth() -> None:
    """Printed (-s), for each number of rows, the chosen one marked; asserted is that nothing is absurdly slow."""
    print()
    for kind in ("fp8", "bf16"):
        for outputs, inputs, tokens, normalised in CASES:
            first = layer(outputs, inputs, kind, device="cuda")
            copies = max(2, min(24, -(-(200 << 20) // first.weight.nbytes)))
            layers = [first, *(layer(outputs, inputs, kind, seed=s, device="cuda") for s in range(1, copies))]
            x, norm = rows(tokens, inputs, device="cuda"), norm_of(inputs, device="cuda") if normalised else None
            chosen = LINEAR.tuning(LinearShape(inputs, outputs, first.weight.itemsize), tokens, x.device)
            for number in (16, 32, 64):
                if number * chosen.columns > 1024:
                    continue
                taken = time_of(layers, x, norm, replace(chosen, rows=number, stages=chosen.stages))
                rate = first.weight.nbytes / taken / 1e6
                print(
                    f"{kind} {outputs:6} x {inputs} {'norm' if normalised else '    '} {tokens:2} tokens, "
                    f"{number} rows{' *' if number == chosen.rows else '  '} {taken:7.2f} us, {rate:5.2f} TB/s"
                )
                assert number != chosen.rows or taken < 20 + first.weight.nbytes / 1e6


def time_of(layers: list[LinearWeights], x: Tensor, norm: NormWeights | None, tuning: LinearTuning) -> float:
    """Microseconds of one call, of weights that are not in the L2."""
    out = torch.empty(len(x), len(layers[0].weight), dtype=x.dtype, device="cuda")

    def once() -> None:
        for weights in layers:
            linear_decode(x, weights, out, tuning, norm=norm)

    try:
        once()
    except triton.runtime.errors.OutOfResources:
        tuning = replace(tuning, stages=2)
        once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            once()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(12):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (4 * len(layers)))
    return sorted(times)[len(times) // 2]
