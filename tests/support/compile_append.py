"""Compile the kernels of `kv_append` for GPUs, in a process where Triton does not interpret them.

Prints, as JSON, [capability, kernel, registers, spilled bytes, whether it waits for the kernel before and lets the
next one begin] of each; the only argument is a folder to work in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs, LayerCache
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import QKNorm
from subten.kernels.attention.triton_append import append_arguments, append_kernel, query_memory
from subten.kernels.attention.triton_encode import Tile, encode_arguments, encode_kernel, side_arguments
from subten.kernels.rope import RopeSpec, rope_table
from support.attention import calibrated
from support.compile_decode import opcode
from support.device_code import compile_kernel
from support.kv import CPU

HEADS, GROUP, HEAD_DIM = 2, 4, 128
CAPABILITIES = {"encode 3": (80, 100), "append 3": (80, 90, 100), "encode 64": (90,), "append 64": (90,)}


def launches() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Name, kernel, arguments and warps of what a decode step of `kv2` launches, for one sequence and for 64."""
    layout = PageLayout(get_format("kv2"), HEAD_DIM)
    calibration = calibrated(layout, HEADS)
    pages = torch.zeros(1, HEADS, layout.record_bytes, dtype=torch.uint8)
    windows = torch.zeros(1, 2, HEADS, layout.format.window_size, HEAD_DIM, dtype=layout.wide_dtype)
    cache = LayerCache(pages, windows, calibration.coding, calibration.mean_key, layout)
    layer = PagedLayers.of([cache])
    norm = QKNorm(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), 1e-6)
    rope = rope_table(RopeSpec(HEAD_DIM, theta=10_000.0), 16, CPU)
    for batch in (3, 64):
        inputs = AttentionInputs(whole(batch + 1), whole(batch), whole(batch, 16), whole(batch))
        arguments = encode_arguments(layer, layer.windows, None, inputs.context_len, inputs, 1 - layout.format.recent)
        tile = Tile.of(batch // 3, HEAD_DIM)
        (sides,) = side_arguments(layer.tables)
        arguments |= {**sides, "TOKENS": tile.tokens, "STAGES": tile.stages}
        yield f"encode {batch}", encode_kernel, arguments, tile.warps
        q = torch.zeros(batch, HEADS * GROUP, HEAD_DIM, dtype=torch.bfloat16)
        k = torch.zeros(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        query = query_memory(q, layer, changed=True)
        arguments = append_arguments(q, k, k, query, None, layer, inputs, norm, rope)
        yield f"append {batch}", append_kernel, arguments, 8


def whole(*shape: int) -> Tensor:
    """Numbers as `AttentionInputs` has them."""
    return torch.zeros(*shape, dtype=torch.int32)


def main() -> None:
    """See above."""
    folder, results = Path(sys.argv[1]), []
    for name, kernel, arguments, warps in launches():
        for capability in CAPABILITIES[name]:
            if "OVERLAP" in arguments:
                arguments["OVERLAP"] = capability >= 90
            code = compile_kernel(kernel, arguments, warps, capability, folder, fp_fusion=False)
            overlaps = {"ACQBULK", "PREEXIT"} <= {opcode(text) for _, text in code.sass}
            results.append([capability, name, code.registers, code.spilled, overlaps])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
