"""Compile the Gluon kernel of a prefill's pages for sm_90, in a process where Triton does not interpret it.

Prints, as JSON, for each case its name, registers of a thread, spilled bytes, opcodes of the loop that multiplies,
in their order, and those of the loop that dequantises. Arguments: a folder to work in, then any number of
FORMAT/HEAD_DIM, with a `+` behind the format where a mean key was removed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from subten.formats import PageLayout, get_format
from subten.kernels.attention.gluon_dequantise import TILE
from subten.kernels.attention.gluon_prefill import WARPS, coded_arguments, coded_kernel
from subten.kernels.attention.triton_prefill import Blocks, prefill_arguments, query_memory
from support.attention import calibrated
from support.compile_decode import instruction
from support.compile_gluon import in_few_pairs
from support.compile_prefill import GROUP, HEADS, TOKENS, chunk
from support.device_code import compile_kernel


def compile_one(name: str, folder: Path) -> dict[str, Any]:
    """Of a format as calibration leaves it."""
    kv_format, head_dim = name.split("/")[0], int(name.split("/")[1])
    layout = PageLayout(get_format(kv_format.rstrip("+")), head_dim)
    calibration = calibrated(layout, HEADS)
    mean_key = in_few_pairs(calibration.mean_key) if kv_format.endswith("+") else None
    q, wide, layer, inputs = chunk(layout, calibration.coding, mean_key)
    arguments = prefill_arguments(
        query_memory(q, layer),
        wide,
        q,
        layer,
        inputs,
        0.1,
        Blocks.of(head_dim),
        sliding_window=None,
        sink_logits=None,
    )
    rows = TOKENS * GROUP
    arguments |= {"sums": torch.zeros(HEADS, rows, head_dim), "stats": torch.zeros(2, HEADS, rows)}
    code = compile_kernel(coded_kernel, coded_arguments(arguments, layer), WARPS, 90, folder, fp_fusion=True)
    loops = sorted(code.loops(), key=len)
    weights = TILE.value // 2  # Of a thread.
    multiplying = next(
        loop
        for loop in loops
        if sum("MUFU.EX2" in line for line in loop) >= weights and any("HGMMA" in line for line in loop)
    )
    dequantising = next(loop for loop in loops if sum("HFMA2" in line for line in loop) >= head_dim // 2)
    return {
        "name": name,
        "registers": code.registers,
        "spilled": code.spilled,
        "multiplying": [instruction(line) for line in multiplying],
        "dequantising": [instruction(line) for line in dequantising],
    }


if __name__ == "__main__":
    print(json.dumps([compile_one(name, Path(sys.argv[1])) for name in sys.argv[2:]]))
