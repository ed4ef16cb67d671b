"""Compile the kernels of a prefill for GPUs, in a process where Triton does not interpret them.

Prints, as JSON, [format, head_dim, capability, kernel, registers, spilled bytes] of each. Arguments: a folder to work
in, then any number of format,head_dim,capability.
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
from subten.formats.coding import LayerCoding
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.triton_append import WideBatch
from subten.kernels.attention.triton_prefill import (
    Blocks,
    prefill_arguments,
    prefill_kernel,
    prepare_arguments,
    prepare_kernel,
    prepare_warps,
    query_memory,
)
from support.attention import calibrated
from support.device_code import compile_kernel

HEADS, GROUP, TOKENS = 2, 4, 64


def chunk(
    layout: PageLayout, coding: LayerCoding, mean_key: MeanKey | None
) -> tuple[Tensor, WideBatch, PagedLayers, AttentionInputs]:
    """Queries, tokens in 16 bit, a layer and a batch of one chunk, all of them zero."""
    pages = torch.zeros(1, HEADS, layout.record_bytes, dtype=torch.uint8)
    windows = torch.zeros(1, 2, HEADS, layout.format.window_size, layout.head_dim, dtype=layout.wide_dtype)
    layer = PagedLayers.of([LayerCache(pages, windows, coding, mean_key, layout)])
    q = torch.zeros(TOKENS, HEADS * GROUP, layout.head_dim, dtype=torch.bfloat16)
    tokens = torch.zeros(2, TOKENS, HEADS, layout.head_dim, dtype=layout.wide_dtype)
    numbers = torch.zeros(16, dtype=torch.int32)
    inputs = AttentionInputs(numbers, numbers, numbers[None], numbers, "chunk")
    return q, WideBatch(tokens, (torch.arange(TOKENS),)), layer, inputs


def launches(name: str, head_dim: int) -> Iterator[tuple[str, Any, dict[str, Any], int, int]]:
    """Name, kernel, arguments, warps and stages of a prefill with all options, and of one without."""
    layout = PageLayout(get_format(name), head_dim)
    calibration = calibrated(layout, HEADS)
    q, wide, layer, inputs = chunk(layout, calibration.coding, calibration.mean_key)
    prepared = query_memory(q, layer)
    yield "prepare", prepare_kernel, prepare_arguments(q, prepared, layer), prepare_warps(head_dim), 1
    blocks = Blocks.of(head_dim)
    for kind, window, logits in (("with all", 100, torch.zeros(HEADS * GROUP)), ("plain", None, None)):
        arguments = prefill_arguments(
            prepared, wide, q, layer, inputs, 0.1, blocks, sliding_window=window, sink_logits=logits
        )
        yield f"prefill {kind}", prefill_kernel, arguments, blocks.warps, blocks.stages


def main() -> None:
    """See above."""
    folder, results = Path(sys.argv[1]), []
    for case in sys.argv[2:]:
        name, head_dim, capability = case.split(",")
        for kernel_name, kernel, arguments, warps, stages in launches(name, int(head_dim)):
            if kernel_name == "prefill plain" and capability != "90":
                continue  # The one with all options takes more of everything.
            code = compile_kernel(
                kernel, arguments, warps, int(capability), folder, fp_fusion=True, stages=stages, listed=False
            )
            results.append([name, int(head_dim), int(capability), kernel_name, code.registers, code.spilled])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
