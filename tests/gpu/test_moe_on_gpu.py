"""The one-launch mixture of experts at full size against float64 on the same weights: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from subten.bench.moe import reference
from subten.bench.moe_cases import MODELS, WEIGHTS, MoECase, build_problem, random_block
from subten.kernels.moe.packing import cut_down
from subten.kernels.moe.plan import MoEShape, plan_moe
from subten.kernels.moe.triton_decode import MoEScratch, moe_decode, multiprocessors
from subten.kernels.moe.triton_moe import TritonMoE
from subten.kernels.moe.unfused import moe_unfused

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
EXACT = 2e-3
NAMES = ("qwen3-30b-a3b", "mix-32b-a9b", "olmoe-1b-7b", "seed-32b-a7b")


def problem_of(name: str, count: int, kind: str):
    return build_problem(MoECase(name, count, kind), [random_block(MODELS[name], kind, CUDA)], CUDA, seed=count)


def run(weights, x, logits, activations="16bit", sums="fixed"):
    """Twice, with one scratch memory."""
    shape = MoEShape.of(weights)
    plan = plan_moe(shape, len(x), multiprocessors(CUDA), activations, sums)
    scratch = MoEScratch.allocate(plan, shape.hidden, CUDA)
    outs = [torch.full(x.shape, torch.nan, device=CUDA) for _ in range(2)]
    for out in outs:
        moe_decode(x, weights, plan, scratch, logits=logits, out=out)
    assert not any(tensor.any() for tensor in vars(scratch).values())
    return outs


def error(found, exact) -> float:
    return float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("count", [1, 8, 33, 64])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64_and_the_same_bits_twice(name: str, kind: str, count: int) -> None:
    problem = problem_of(name, count, kind)
    weights, x, logits = problem.layers[0], problem.x[0], problem.logits[0]
    exact = reference(weights, x, logits)
    for activations in ("16bit",) if kind == "bf16" else ("16bit", "fp8x2"):
        first, second = run(weights, x, logits, activations)
        assert error(first, exact) <= EXACT
        assert torch.equal(first, second)
    assert error(run(weights, x, logits, sums="float")[0], exact) <= EXACT


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_token_has_the_same_bits_in_any_batch(name: str, kind: str) -> None:
    problem = problem_of(name, 64, kind)
    weights, x, logits = problem.layers[0], problem.x[0], problem.logits[0]
    for activations in ("16bit",) if kind == "bf16" else ("16bit", "fp8x2"):
        together = run(weights, x, logits, activations)[0]
        for count in (1, 8, 17, 32):
            assert torch.equal(run(weights, x[-count:], logits[-count:], activations)[0], together[-count:])


def test_cut_and_whole_give_the_same_bits() -> None:
    problem = problem_of("mix-32b-a9b", 8, "block")
    weights, x, logits = problem.layers[0], problem.x[0], problem.logits[0]
    whole = run(weights, x, logits)[0]
    assert torch.equal(run(cut_down(weights, 128), x, logits)[0], whole)


def test_a_graph_captures_both_ways() -> None:
    problem = problem_of("qwen3-30b-a3b", 8, "bf16")
    weights, x = problem.layers[0], problem.x[0].clone()
    for moe in (TritonMoE(), moe_unfused):
        for _ in range(2):
            moe(x, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moe(x, weights)
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(captured, moe(x, weights))


def test_nan_stays_in_its_token() -> None:
    problem = problem_of("qwen3-30b-a3b", 32, "block")
    weights, x, logits = problem.layers[0], problem.x[0], problem.logits[0]
    clean = run(weights, x, logits)[0]
    x = x.clone()
    x[5, 100] = torch.nan
    found = run(weights, x, logits)[0]
    assert found[5].isnan().all()
    assert torch.equal(found[6:], clean[6:])
    assert torch.equal(found[:5], clean[:5])


def test_prompts_agree_with_the_reference() -> None:
    problem = problem_of("olmoe-1b-7b", 64, "bf16")
    weights, x = problem.layers[0], problem.x[0].repeat(4, 1)
    logits = (x @ weights.router.T).float()
    exact = reference(weights, x, logits)
    assert float((TritonMoE()(x, weights).double() - exact).norm() / exact.norm()) <= 1e-2
