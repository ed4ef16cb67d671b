"""Find how the Gluon decode kernel does its work fastest on this GPU: warps and registers of a program, and splits.

python tools/tune_attention.py OUT.json [--rows 1x8x4,8x4x8] [--context 32k] [--mean-key]

Prints the candidates of each row, fastest first, and writes all. `tune_gluon` and the constants of `plan_gluon`
(src/subten/kernels/attention/gluon_plan.py) are what came of it on an H200; for another GPU run this and compare.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subten.bench.caches import NewTokens, build_cache, layer_bytes, random_calibration
from subten.bench.machine import describe, require_gpu
from subten.bench.shapes import Shape, parse_context
from subten.bench.timing import copies_past, time_calls
from subten.engine.moments import MEAN_PAIRS
from subten.formats import PageLayout, get_format
from subten.kernels.attention.gluon_decode import GluonScratch, attend_decode
from subten.kernels.attention.gluon_plan import GluonPlan, GluonShape, GluonTuning, plan_gluon
from subten.kernels.attention.triton_append import append_decode

ROWS = "1x8x4,8x8x4,32x8x4,8x4x8"
PROGRAMS = (
    GluonTuning(4, 168, 1),
    GluonTuning(4, 255, 1),
    GluonTuning(4, 255, 2),
    GluonTuning(8, 128, 1),
    GluonTuning(8, 255, 2),
)
SPLITS = "0.7,1.0,1.4"
"""Times those that `plan_gluon` takes."""
COMPILED_AT_ONCE = 12


@dataclass(frozen=True)
class Measured:
    """One candidate: microseconds of a launch."""

    row: str
    context: int
    mean_key: bool
    warps: int
    registers: int
    pages: int
    overlap: bool
    splits: int
    us: float


def measure(
    row: str,
    context: int,
    mean_key: bool,
    tuning: GluonTuning,
    factors: Sequence[float] = (1.0,),
    *,
    compile_only: bool = False,
) -> list[Measured]:
    """Some splits of one way to cut the work; with `compile_only` one launch on a small cache."""
    device, layout = torch.device("cuda", torch.cuda.current_device()), PageLayout(get_format("kv2"), 128)
    shape = replace(Shape.parse(row), batch=1) if compile_only else Shape.parse(row)
    context = 1024 if compile_only else context
    copies = 1 if compile_only else copies_past(60 << 20, layer_bytes(layout, shape, context))
    calibration = random_calibration(layout.format, shape, context + 64, device)
    cache = build_cache(layout, shape.kv_heads, [context] * shape.batch, copies, calibration)
    cache = cache.with_mean_key(calibration.mean_key if mean_key else None)
    tokens = NewTokens.random(shape, device)
    layers = [cache.layers.layer(index) for index in range(copies)]
    queries = [append_decode(tokens.q, tokens.k, tokens.v, layer, cache.inputs, integer=True) for layer in layers]
    of_layer = GluonShape.of(layout, shape.group, MEAN_PAIRS if mean_key else 0)
    num_sms, max_pages = (
        torch.cuda.get_device_properties(device).multi_processor_count,
        cache.inputs.block_table.shape[1],
    )
    chosen = plan_gluon(of_layer, shape.batch, shape.kv_heads, max_pages, num_sms, tuning)
    found = []
    for splits in sorted({max(1, round(chosen.splits * factor)) for factor in factors}):
        plan = GluonPlan(splits, chosen.units_per_split, tuning)
        scratch = GluonScratch.allocate(queries[0], layers[0], plan)
        calls = [
            partial(attend_decode, query, layer, cache.inputs, 128**-0.5, plan, scratch)
            for query, layer in zip(queries, layers, strict=True)
        ]
        if compile_only:
            calls[0]()
            break
        us = time_calls(calls).us
        found.append(Measured(row, context, mean_key, **asdict(tuning), splits=splits, us=us))
    return found


def main() -> None:
    """Parse the command line, compile side by side, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--context", default="32k")
    parser.add_argument("--mean-key", action="store_true")
    parser.add_argument("--splits", default=SPLITS, help="times those of the plan")
    parser.add_argument("--commit")
    args = parser.parse_args()
    machine = describe(require_gpu(), args.commit)
    rows, context = args.rows.split(","), parse_context(args.context)
    factors = [float(text) for text in args.splits.split(",")]
    kinds = {Shape.parse(row).group: row for row in rows}
    with ProcessPoolExecutor(COMPILED_AT_ONCE, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in kinds.values():
            for tuning in PROGRAMS:
                pool.submit(partial(measure, row, context, args.mean_key, tuning, compile_only=True))
    results: list[Measured] = []
    for row in rows:
        of_row = [one for tuning in PROGRAMS for one in measure(row, context, args.mean_key, tuning, factors)]
        of_row.sort(key=lambda one: one.us)
        results += of_row
        listed = ", ".join(
            f"{one.us:.1f} us ({one.warps}w {one.registers}r {one.pages}p{'o' * one.overlap} {one.splits}s)"
            for one in of_row
        )
        print(f"{row} at {args.context}: {listed}", flush=True)
    content: dict[str, Any] = {"machine": asdict(machine), "decode": [asdict(one) for one in results]}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
