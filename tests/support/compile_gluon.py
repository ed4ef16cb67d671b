"""Compile the Gluon decode kernel for sm_90. As compile_decode.py; arguments are FORMAT/HEAD_DIM/GROUP, with a `+`
behind the format where a mean key was removed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.gluon_decode import GluonScratch, decode_arguments, decode_kernel
from subten.kernels.attention.gluon_plan import GluonPlan, GluonShape, tune_gluon
from subten.kernels.attention.triton_append import query_memory
from support.attention import calibrated
from support.compile_decode import BATCH, HEADS, Compiled, opcode, whole
from support.device_code import compile_kernel

CAPABILITY = 90


def compile_one(name: str, folder: Path) -> Compiled:
    """Of a format as calibration leaves it."""
    kv_format, *numbers = name.split("/")
    head_dim, group = map(int, numbers)
    layout = PageLayout(get_format(kv_format.rstrip("+")), head_dim)
    calibration = calibrated(layout, HEADS)
    mean_key = in_few_pairs(calibration.mean_key) if kv_format.endswith("+") else None
    pages = torch.zeros(1, HEADS, layout.record_bytes, dtype=torch.uint8)
    windows = torch.zeros(BATCH, 2, HEADS, layout.format.window_size, head_dim, dtype=layout.wide_dtype)
    layer = PagedLayers.of([LayerCache(pages, windows, calibration.coding, mean_key, layout)])
    inputs = AttentionInputs(whole(BATCH + 1), whole(BATCH), whole(BATCH, 512), whole(BATCH))
    q = torch.zeros(BATCH, HEADS * group, head_dim, dtype=torch.bfloat16)
    query = query_memory(q, layer, changed=False, integer=True)
    assert layer.tables.gluon is not None
    shape = GluonShape.of(layout, group, layer.tables.gluon.num_mean_pairs)
    tuning = tune_gluon(shape, pages_per_sm=1000.0)
    plan = GluonPlan(16, 8, tuning)
    scratch = GluonScratch.allocate(query, layer, plan)
    arguments = decode_arguments(query, layer, inputs, 0.1, plan, scratch, shape, None, torch.empty_like(q))
    code = compile_kernel(
        decode_kernel,
        arguments,
        tuning.warps,
        CAPABILITY,
        folder,
        fp_fusion=True,
        max_registers=tuning.registers,
    )
    loops = code.loops()
    pages_loop = max(loops, key=lambda lines: sum("IMMA" in line for line in lines))
    return Compiled(
        name,
        code.registers,
        code.spilled,
        sum(opcode(line) in ("LDL", "STL") for line in pages_loop),
        len(pages_loop) * 32 / (2 * 64 * head_dim * tuning.pages),
        dict(Counter(opcode(line) for line in pages_loop).most_common()),
    )


def in_few_pairs(mean_key: MeanKey | None) -> MeanKey:
    """As calibration leaves it: zero but for sixteen pairs, other ones in every head."""
    assert mean_key is not None
    heads, head_dim = mean_key.mean.shape
    live = (torch.arange(head_dim // 2) + torch.arange(heads)[:, None]) % (head_dim // 32) == 0
    return replace(mean_key, mean=mean_key.mean * live.repeat(1, 2))


if __name__ == "__main__":
    results = [asdict(compile_one(name, Path(sys.argv[1]))) for name in sys.argv[2:]]
    print(json.dumps(results))
