"""The one-launch mixtures of experts at full size against float64 on the same weights: `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subten.bench.moe import reference
from subten.bench.moe_cases import MODELS, WEIGHTS, MoECase, build_problem, random_block
from subten.bench.moe_kernels import Variant, cut_copy, make_plan, module_of, variants
from subten.kernels.moe.gluon_moe import GluonMoE, pack
from subten.kernels.moe.gluon_plan import SLICE, GluonMoETuning
from subten.kernels.moe.packing import EVERY, cut_down, wide_down, wide_gate_up
from subten.kernels.moe.plan import MoEShape
from subten.kernels.moe.restoring import in_one_pass, restored_down, restored_gate_up
from subten.kernels.moe.triton_decode import MoEScratch, multiprocessors
from subten.kernels.moe.triton_moe import TritonMoE
from subten.kernels.moe.unfused import moe_unfused

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
EXACT = 2e-3
NAMES = ("qwen3-30b-a3b", "mix-32b-a9b", "olmoe-1b-7b", "seed-32b-a7b")
KERNELS = ("triton", "gluon")
of_both = pytest.mark.parametrize("kernel", KERNELS)


def problem_of(name: str, count: int, kind: str, kernel: str = "triton"):
    """Weights as the kernel takes them, tokens, logits."""
    block = random_block(MODELS[name], kind, CUDA)
    problem = build_problem(MoECase(name, count, kind), [block], CUDA, seed=count)
    return pack(block) if kernel == "gluon" else block, problem.x[0], problem.logits[0]


def ways_of(kernel: str, kind: str) -> list[Variant]:
    """That multiply to `EXACT`, with sums that have the same bits every time."""
    return variants(MoECase(NAMES[0], 1, kind), [kernel], ["16bit", "fp8x2"], ["fixed"])


def plan_for(weights, count, way, tuning=None):
    return make_plan(way, MoEShape.of(weights), count, multiprocessors(CUDA), tuning)


def run(weights, x, logits, way, plan=None, **options):
    """Twice, with one scratch memory."""
    plan = plan or plan_for(weights, len(x), way)
    scratch = MoEScratch.allocate(plan, x.shape[1], CUDA)
    outs = [torch.full(x.shape, torch.nan, device=CUDA) for _ in range(2)]
    for out in outs:
        module_of(way.kernel).moe_decode(x, weights, plan, scratch, logits=logits, out=out, **options)
    assert not any(tensor.any() for tensor in vars(scratch).values())
    return outs


def error(found, exact) -> float:
    return float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("count", [1, 8, 33, 64])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
@of_both
def test_against_float64_and_the_same_bits_twice(kernel: str, name: str, kind: str, count: int) -> None:
    weights, x, logits = problem_of(name, count, kind, kernel)
    exact = reference(weights, x, logits)
    ways = ways_of(kernel, kind)
    for way in ways:
        first, second = run(weights, x, logits, way)
        assert error(first, exact) <= EXACT
        assert torch.equal(first, second)
    if count == 8:
        assert error(run(weights, x, logits, replace(ways[0], sums="float"))[0], exact) <= EXACT


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES[:2])
@of_both
def test_a_token_has_the_same_bits_in_any_batch(kernel: str, name: str, kind: str) -> None:
    weights, x, logits = problem_of(name, 64, kind, kernel)
    for way in ways_of(kernel, kind):
        together = run(weights, x, logits, way)[0]
        for count in (1, 8, 17):
            assert torch.equal(run(weights, x[-count:], logits[-count:], way)[0], together[-count:])


@pytest.mark.parametrize("name", ["mix-32b-a9b", "qwen3-30b-a3b"])
@of_both
def test_any_number_of_programs_gives_the_same_bits(kernel: str, name: str) -> None:
    """One has all items in turn, seven have many each, and the last of them fewer."""
    weights, x, logits = problem_of(name, 8, "block", kernel)
    way = ways_of(kernel, "block")[0]
    plan = plan_for(weights, 8, way)
    usual = run(weights, x, logits, way, plan)[0]
    for programs in (1, 7, 131):
        assert torch.equal(run(weights, x, logits, way, replace(plan, programs=programs))[0], usual)


@pytest.mark.parametrize("kind", ["block", "bf16"])
def test_no_way_to_do_the_work_changes_a_bit(kind: str) -> None:
    """How many slices leave a program together, and how many stages there are."""
    weights, x, logits = problem_of("mix-32b-a9b", 8, kind, "gluon")
    (way,) = ways_of("gluon", kind)
    first, *others = (
        run(weights, x, logits, way, plan_for(weights, 8, way, GluonMoETuning(SLICE, 8, *tuning)))[0]
        for tuning in ((1, 2), (3, 4), (5, 3))
    )
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("name", ["mix-32b-a9b", "seed-32b-a7b"])
def test_further_tiles_of_columns_give_the_same_bits(name: str) -> None:
    weights, x, logits = problem_of(name, 64, "block", "gluon")
    (way,) = ways_of("gluon", "block")
    one, two = (
        run(weights, x, logits, way, plan_for(weights, 64, way, GluonMoETuning(SLICE, columns, 4, 2)))[0]
        for columns in (16, 8)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("routing", ["ties", "one choice"])
@of_both
def test_unusual_routing(kernel: str, routing: str) -> None:
    """Scores that many experts share; the same experts for all tokens, further tiles of columns among them."""
    weights, x, logits = problem_of("qwen3-30b-a3b", 33, "block", kernel)
    way = ways_of(kernel, "block")[0]
    logits = logits.round() if routing == "ties" else logits[:1].repeat(33, 1)
    assert error(run(weights, x, logits, way)[0], reference(weights, x, logits)) <= EXACT


@of_both
def test_the_residual_and_a_factor(kernel: str) -> None:
    weights, x, logits = problem_of("qwen3-30b-a3b", 8, "block", kernel)
    way = ways_of(kernel, "block")[0]
    residual = torch.randn(x.shape, device=CUDA).bfloat16()
    exact = residual.double() + 0.5 * reference(weights, x, logits)
    assert error(run(weights, x, logits, way, residual=residual, factor=0.5)[0], exact) <= EXACT


def test_cut_and_whole_give_the_same_bits() -> None:
    weights, x, logits = problem_of("mix-32b-a9b", 8, "block")
    way = ways_of("triton", "block")[0]
    whole = run(weights, x, logits, way)[0]
    assert torch.equal(run(cut_down(weights, 128), x, logits, way)[0], whole)


def test_a_graph_captures_all_ways() -> None:
    weights, x, _ = problem_of("qwen3-30b-a3b", 8, "bf16")
    x = x.clone()
    for moe, block in ((TritonMoE(), weights), (moe_unfused, weights), (GluonMoE(), cut_copy(weights))):
        for _ in range(2):
            moe(x, block)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moe(x, block)
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(captured, moe(x, block))


@of_both
def test_nan_stays_in_its_token(kernel: str) -> None:
    weights, x, logits = problem_of("qwen3-30b-a3b", 32, "block", kernel)
    way = ways_of(kernel, "block")[0]
    clean = run(weights, x, logits, way)[0]
    x = x.clone()
    x[5, 100] = torch.nan
    found = run(weights, x, logits, way)[0]
    assert found[5].isnan().all()
    assert torch.equal(found[6:], clean[6:])
    assert torch.equal(found[:5], clean[:5])


def test_prompts_agree_with_the_reference() -> None:
    weights, x, _ = problem_of("olmoe-1b-7b", 64, "bf16")
    x = x.repeat(4, 1)
    logits = (x @ weights.router.T).float()
    exact = reference(weights, x, logits)
    assert float((TritonMoE()(x, weights).double() - exact).norm() / exact.norm()) <= 1e-2


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_are_restored_to_the_same_bits_as_in_torch(kernel, kind, dtype) -> None:
    weights, *_ = problem_of("olmoe-1b-7b", 1, kind, kernel)
    experts = weights.experts
    assert in_one_pass(CUDA, dtype)
    assert torch.equal(restored_gate_up(experts, dtype), wide_gate_up(experts, EVERY, dtype))
    assert torch.equal(restored_down(experts, dtype), wide_down(experts, EVERY, dtype))
