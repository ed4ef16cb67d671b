"""Find how the one-launch mixture of experts does its work fastest on this GPU: slices, warps, stages, registers.

python tools/tune_moe.py OUT.json [--shapes qwen3-30b-a3b,mix-32b-a9b] [--tokens 1,8,32] [--weights block]
    [--activations 16bit,fp8x2] [--sums fixed]

Prints the candidates of each case, fastest first, and writes all. `tune_moe` and the constants of
src/subten/kernels/moe/plan.py are to be what comes of it; a slice of its own for each number of tokens gives other
bits at each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from subten.bench.checks import require
from subten.bench.machine import describe, first_line, require_gpu, require_sound_device
from subten.bench.moe import ALLOWED, Variant, reference, variants
from subten.bench.moe_cases import (
    MODELS,
    MoECase,
    MoEProblem,
    build_problem,
    choose_cases,
    random_block,
    random_layers,
)
from subten.bench.timing import time_calls
from subten.kernels.moe.plan import MoEPlan, MoEShape, plan_moe, slice_widths, tune_moe
from subten.kernels.moe.triton_decode import MoEScratch, moe_decode

COMPILED_AT_ONCE = 12


@dataclass(frozen=True)
class Measured:
    """One candidate: microseconds of a launch, or why there are none."""

    case: MoECase
    variant: Variant
    plan: MoEPlan
    us: float | None
    note: str | None


def candidates(shape: MoEShape, tokens: int, variant: Variant, num_sms: int) -> Iterator[MoEPlan]:
    """Around the plan of each slice: more or fewer warps, steps in flight and registers; one item per program or as
    many programs as run at once."""
    for width in slice_widths(shape):
        tuning = tune_moe(shape, num_sms, variant.activations, tokens, width)
        for warps, stages, registers in product((4, 8), (3, 4, 6), (128, 168, 255)):
            if warps == 8 and width == 32:
                continue
            tried = replace(tuning, warps=warps, stages=stages, registers=registers)
            plan = plan_moe(shape, tokens, num_sms, variant.activations, variant.sums, tried)
            yield plan
            items = (min(shape.num_experts, tokens * shape.top_k) * shape.intermediate + shape.shared) // width
            if items > plan.programs:
                yield replace(plan, programs=items)


def launch(problem: MoEProblem, plan: MoEPlan, variant: Variant, *, timed: bool) -> float:
    """Check a plan and, if it is `timed`, return microseconds."""
    shape = MoEShape.of(problem.layers[0])
    scratch = MoEScratch.allocate(plan, shape.hidden, problem.x[0].device)
    calls = [
        partial(moe_decode, x, weights, plan, scratch, logits=logits)
        for x, weights, logits in zip(problem.x, problem.layers, problem.logits, strict=True)
    ]
    result = calls[0]()
    if not timed:
        return 0.0
    exact = reference(problem.layers[0], problem.x[0], problem.logits[0])
    # The result is rounded to bf16.
    require([(result, exact)], ALLOWED[variant.activations] + 2e-3)
    return time_calls(calls).us


def compile_one(case: MoECase, plan: MoEPlan, variant: Variant) -> None:
    """One launch in a process of its own, for what it leaves in Triton's cache."""
    device = torch.device("cuda", torch.cuda.current_device())
    block = random_block(MODELS[case.shape], case.weights, device)
    launch(build_problem(case, [block], device), plan, variant, timed=False)


def main() -> None:
    """Parse the command line, compile side by side, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mix-32b-a9b")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--weights", default="block")
    parser.add_argument("--activations", default="16bit,fp8x2")
    parser.add_argument("--sums", default="fixed")
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = require_gpu()
    machine = describe(device, args.commit)
    cases = choose_cases(*(text.split(",") for text in (args.shapes, args.tokens, args.weights)))
    work = [
        (case, plan, variant)
        for case in cases
        for variant in variants(case, args.activations.split(","), args.sums.split(","))
        for plan in candidates(
            MoEShape.of(random_block(MODELS[case.shape], case.weights, device)), case.tokens, variant, machine.num_sms
        )
    ]
    with ProcessPoolExecutor(COMPILED_AT_ONCE, mp_context=get_context("spawn")) as pool:
        for one in work:
            pool.submit(compile_one, *one)
    results: list[Measured] = []
    for case in cases:
        layers = random_layers(case.shape, case.weights, machine.l2_bytes, device)
        problem = build_problem(case, layers, device)
        of_case = []
        for _, plan, variant in (one for one in work if one[0] == case):
            try:
                of_case.append(Measured(case, variant, plan, launch(problem, plan, variant, timed=True), None))
            except Exception as failure:  # more registers or shared memory than there are, or a wrong result
                require_sound_device(failure)
                of_case.append(Measured(case, variant, plan, None, first_line(failure)))
        of_case.sort(key=lambda one: one.us or float("inf"))
        results += of_case
        print(case, f"floor {problem.nbytes / machine.read_tb_per_s / 1e6:.1f} us")
        for best in of_case[:6]:
            print(
                f"  {best.us or 0:.1f} us {best.variant} {best.plan.tuning} programs {best.plan.programs}", flush=True
            )
        args.out.write_text(
            json.dumps({"machine": asdict(machine), "moe": [asdict(one) for one in results]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
