"""Find how the one-launch mixture of experts does its work fastest on this GPU: slices, columns, warps, stages.

python tools/tune_moe.py OUT.json [--shapes qwen3-30b-a3b,olmoe-1b-7b,mix-32b-a9b] [--tokens 1,8,32]
    [--weights block] [--kernels gluon,triton] [--activations 16bit,fp8] [--sums fixed] [--seconds 270]

Compiles side by side, for 60% of the time at most, measures, prints the fastest of each case, and writes all;
`python -m subten.bench moe --tuned OUT.json` measures with the fastest. `tune_moe` and `tune_gluon_moe` of
src/subten/kernels/moe/ are to be what comes of it; a slice of its own for each number of tokens gives other bits at
each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path

import torch

from subten.bench.checks import require
from subten.bench.machine import Machine, describe, first_line, require_gpu, require_sound_device
from subten.bench.moe import ALLOWED, compile_moe_ahead, reference, shape_of
from subten.bench.moe_cases import MoECase, MoEProblem, build_problem, choose_cases, random_layers
from subten.bench.moe_kernels import Plan, Variant, cut_copy, make_plan, module_of, variants
from subten.bench.terminal import announce, names
from subten.bench.timing import time_calls
from subten.kernels.moe import MoEWeights
from subten.kernels.moe.gluon_plan import SLICE, GluonMoETuning, fits, longest_run
from subten.kernels.moe.plan import (
    MoEPlan,
    MoEShape,
    MoETuning,
    most_items,
    plan_moe,
    slice_widths,
    tune_moe,
)
from subten.kernels.moe.triton_decode import MoEScratch

REPLAYS = 9
SHOWN = 4
SHARED_MEMORY = 227 << 10


@dataclass(frozen=True)
class Measured:
    """One candidate: microseconds of a launch, or why there are none."""

    case: MoECase
    variant: Variant
    plan: Plan
    us: float | None
    note: str | None


def candidates(shape: MoEShape, tokens: int, variant: Variant, num_sms: int) -> Iterator[Plan]:
    """What is tried of a kernel."""
    of_kernel = gluon_candidates if variant.kernel == "gluon" else triton_candidates
    return of_kernel(shape, tokens, variant, num_sms)


def gluon_candidates(shape: MoEShape, tokens: int, variant: Variant, num_sms: int) -> Iterator[Plan]:
    """Columns and stages, with runs as long as there is room for: the default first."""
    default = make_plan(variant, shape, tokens, num_sms)
    yield default
    for columns, stages in product((8, 16), (2, 3, 4, 5, 6)):
        tuning = GluonMoETuning(SLICE, columns, longest_run(shape, columns, stages), stages)
        if columns <= max(8, tokens) and fits(shape, tuning) and tuning != default.tuning:
            yield make_plan(variant, shape, tokens, num_sms, tuning)


def triton_candidates(shape: MoEShape, tokens: int, variant: Variant, num_sms: int) -> Iterator[MoEPlan]:
    """Around the plan of the two best slices: other columns, warps and numbers of steps in flight, the default first
    of each; as many programs as run at once, one for each item, or fewer. With tokens in 16 bit and more than 8
    columns there are two warps, see `tune_moe`."""
    first = plan_moe(shape, tokens, num_sms, variant.activations, variant.sums).tuning.slice
    widths = sorted(slice_widths(shape), key=lambda width: abs(width.bit_length() - first.bit_length()))[:2]
    for width in widths:
        tuning = tune_moe(shape, num_sms, variant.activations, tokens, width)
        for columns in dict.fromkeys([tuning.columns, 8, 2 * tuning.columns]):
            if not (8 if variant.activations == "16bit" else 16) <= columns <= max(tuning.columns, tokens):
                continue
            if variant.activations == "16bit":
                kinds = [(4, 168), (2, 168), (8, 128)] if columns == 8 else [(2, 255)]
            else:
                kinds = [(8, 128), (4, 168)] if columns == 16 else [(8, 255)]
            for (warps, registers), stages in product(kinds, (3, 4, 6)):
                tried = replace(tuning, columns=columns, warps=warps, registers=registers, stages=stages)
                if tried.stages * step_bytes(shape, tried) > SHARED_MEMORY:
                    continue
                plan = plan_moe(shape, tokens, num_sms, variant.activations, variant.sums, tried)
                yield plan
                if (warps, registers) == kinds[0] and stages == 3:
                    items = most_items(shape, tokens, tried.columns, tried.slice)
                    others = {items, 2 * num_sms, num_sms} - {plan.programs}
                    yield from (replace(plan, programs=count) for count in sorted(others) if count <= items)


def step_bytes(shape: MoEShape, tuning: MoETuning) -> int:
    """That a step of the first loop has in shared memory."""
    itemsize = 2 if shape.scales == "none" else 1
    return tuning.block_k * (2 * tuning.slice * itemsize + 2 * tuning.columns)


def launch(problem: MoEProblem, layers: Sequence[MoEWeights], plan: Plan, variant: Variant) -> float:
    """Check a plan for the layers as its kernel takes them, and return its microseconds."""
    moe_decode = module_of(variant.kernel).moe_decode
    shape = MoEShape.of(problem.layers[0])
    scratch = MoEScratch.allocate(plan, shape.hidden, problem.x[0].device)
    calls = [
        partial(moe_decode, x, weights, plan, scratch, logits=logits)
        for x, weights, logits in zip(problem.x, layers, problem.logits, strict=True)
    ]
    exact = reference(problem.layers[0], problem.x[0], problem.logits[0])
    # The result is rounded to bf16.
    require([(calls[0](), exact)], ALLOWED[variant.activations] + 2e-3)
    return time_calls(calls, REPLAYS).us


def measure(problem: MoEProblem, case: MoECase, work: Sequence[tuple[Variant, Plan]], until: float) -> list[Measured]:
    """Candidates of a case, fastest first, as far as the time allows."""
    results = []
    layers = {"triton": problem.layers}
    if any(variant.kernel == "gluon" for variant, _ in work):
        layers["gluon"] = [cut_copy(weights) for weights in problem.layers]
    for variant, plan in work:
        if time.monotonic() > until:
            break
        try:
            us = launch(problem, layers[variant.kernel], plan, variant)
            results.append(Measured(case, variant, plan, us, None))
        except Exception as failure:  # more registers or shared memory than there are, or a wrong result
            require_sound_device(failure)
            results.append(Measured(case, variant, plan, None, first_line(failure)))
    return sorted(results, key=lambda one: one.us or float("inf"))


def show(case: MoECase, results: Sequence[Measured], floor: float, candidates: int) -> None:
    """The fastest of each variant, and how many were not measured or have no figure."""
    failed = [one for one in results if one.us is None]
    print(f"{case.shape} {case.weights} {case.tokens}: floor {floor:.1f} us, {len(results)} of {candidates} measured")
    for variant in dict.fromkeys(one.variant for one in results):
        for one in [one for one in results if one.variant == variant and one.us][:SHOWN]:
            share = floor / (one.us or 1)
            print(
                f"  {one.us:8.1f} us {share:4.0%} {variant.kernel:<6} {variant.activations:<5} {variant.sums:<5} "
                f"{described(one.plan)}"
            )
    if failed:
        print(f"  {len(failed)} without a figure: {failed[0].note}")
    print(end="", flush=True)


def described(plan: Plan) -> str:
    """What is tried, on one line."""
    t = plan.tuning
    if isinstance(t, GluonMoETuning):
        tiles = f"slice {t.slice:3} columns {t.columns:2} run {t.run:2} stages {t.stages}"
    else:
        tiles = (
            f"slice {t.slice:3} k {t.block_k:3} h {t.block_h:3} columns {t.columns:2} warps {t.warps} "
            f"stages {t.stages} registers {t.registers}"
        )
    return f"{tiles} programs {plan.programs}"


def main() -> None:
    """Parse the command line, compile side by side, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,olmoe-1b-7b,mix-32b-a9b")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--weights", default="block")
    parser.add_argument("--kernels", default="gluon,triton")
    parser.add_argument("--activations", default="16bit,fp8")
    parser.add_argument("--sums", default="fixed")
    parser.add_argument("--seconds", type=float, default=270, help="that all of it may take, about")
    parser.add_argument("--commit")
    args = parser.parse_args()
    start, device = time.monotonic(), require_gpu()
    machine = describe(device, args.commit)
    announce(machine)
    cases = choose_cases(*map(names, (args.shapes, args.tokens, args.weights)))
    work = {case: plans(case, args, machine) for case in cases}
    # The first candidates of all cases come first: what the time does not allow is missing evenly. The number of
    # programs is not compiled in.
    turns = zip_longest(*([(case, replace(plan, programs=1)) for _, plan in work[case]] for case in cases))
    tasks = list(dict.fromkeys(task for turn in turns for task in turn if task is not None))
    print(
        compile_moe_ahead(tasks, [torch.bfloat16], args.seconds * 0.6),
        f"[{time.monotonic() - start:.0f} s]",
        flush=True,
    )
    results: list[Measured] = []
    for number, case in enumerate(cases, 1):
        problem = build_problem(case, random_layers(case.shape, case.weights, machine.l2_bytes, device), device)
        left = start + args.seconds - time.monotonic()
        of_case = measure(problem, case, work[case], time.monotonic() + left / (len(cases) - number + 1))
        show(case, of_case, problem.nbytes / machine.read_tb_per_s / 1e6, len(work[case]))
        results += of_case
        args.out.write_text(
            json.dumps({"machine": asdict(machine), "moe": [asdict(one) for one in results]}, indent=1) + "\n"
        )
    print(f"[{time.monotonic() - start:.0f} s]", flush=True)


def plans(case: MoECase, args: argparse.Namespace, machine: Machine) -> list[tuple[Variant, Plan]]:
    """The candidates of a case."""
    shape = shape_of(case)
    return [
        (variant, plan)
        for variant in variants(case, names(args.kernels), names(args.activations), names(args.sums))
        for plan in candidates(shape, case.tokens, variant, machine.num_sms)
    ]


if __name__ == "__main__":
    main()
