"""Compile the kernels around the products of many tokens for GPUs, in a process where Triton does not interpret them.

Prints, as JSON, [kernel, capability, registers, spilled bytes] of each. Argument: a folder to work in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from subten.kernels.attention.inputs import QKNorm
from subten.kernels.attention.triton_heads import WARPS, heads_arguments, heads_kernel
from subten.kernels.linear.inputs import NormWeights
from subten.kernels.linear.triton_rows import (
    FINISH_WARPS,
    finish_arguments,
    finish_kernel,
    norm_arguments,
    norm_kernel,
    norm_warps,
)
from subten.kernels.rope import RopeSpec, rope_table
from support.device_code import compile_kernel
from support.kv import CPU

TOKENS, HIDDEN, HEAD_DIM = 256, 4096, 128


def launches() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Name, kernel, arguments and warps."""
    q, k = (torch.zeros(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (32, 4))
    norm = QKNorm(torch.ones(HEAD_DIM, dtype=torch.bfloat16), torch.ones(HEAD_DIM, dtype=torch.bfloat16), 1e-6)
    rope = rope_table(RopeSpec(HEAD_DIM, theta=10_000.0), 16, CPU)
    yield "heads", heads_kernel, heads_arguments(q, k, q, k, torch.arange(TOKENS), norm, rope), WARPS
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "norm", norm_kernel, norm_arguments(x, NormWeights(weight, 1e-6), x), norm_warps(HIDDEN)
    yield "finish", finish_kernel, finish_arguments(x, weight.float(), weight, x, 0.5, x), FINISH_WARPS


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = []
    for name, kernel, arguments, warps in launches():
        for capability in (80, 90, 100):
            code = compile_kernel(kernel, arguments, warps, capability, folder, fp_fusion=False, listed=False)
            results.append([name, capability, code.registers, code.spilled])
    print(json.dumps(results))
