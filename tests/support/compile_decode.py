"""Compile the decode kernel for GPUs, in a process where Triton does not interpret it.

Prints, as JSON, a list of `Compiled`. Arguments: a folder to work in, then what to compile, as
FORMAT/HEAD_DIM/GROUP/WARPS/CAPABILITY.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs, LayerCache
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.plan import DecodePlan, DecodeShape, tune_decode
from subten.kernels.attention.triton_append import query_memory
from subten.kernels.attention.triton_decode import DecodeScratch, decode_arguments, decode_kernel
from support.attention import calibrated
from support.device_code import compile_kernel

HEADS, BATCH = 2, 3


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: as in the argument.
        registers: of a thread.
        spilled: bytes.
        spilled_in_loops: instructions that move what is spilled, in loops.
        per_element: instructions of the loop over pages, per cached element.
        opcodes: of that loop, and how often they occur.
    """

    name: str
    registers: int
    spilled: int
    spilled_in_loops: int
    per_element: float
    opcodes: dict[str, int]


def compile_one(name: str, folder: Path) -> Compiled:
    """Of a format as calibration leaves it."""
    kv_format, *numbers = name.split("/")
    head_dim, group, warps, capability = map(int, numbers)
    layout = PageLayout(get_format(kv_format), head_dim)
    calibration = calibrated(layout, HEADS)
    pages = torch.zeros(1, HEADS, layout.record_bytes, dtype=torch.uint8)
    windows = torch.zeros(BATCH, 2, HEADS, layout.format.window_size, head_dim, dtype=layout.wide_dtype)
    layer = PagedLayers.of([LayerCache(pages, windows, calibration.coding, calibration.mean_key, layout)])
    inputs = AttentionInputs(whole(BATCH + 1), whole(BATCH), whole(BATCH, 512), whole(BATCH))
    query = query_memory(torch.zeros(BATCH, HEADS * group, head_dim, dtype=torch.bfloat16), layer, changed=False)
    shape = DecodeShape.of(layout, group)
    tuning = tune_decode(shape, layer.tables.mean is not None, warps)
    plan = DecodePlan(16, 8, tuning)
    scratch = DecodeScratch.allocate(query, layer, plan)
    out = torch.empty_like(query.q)
    arguments = decode_arguments(query, layer, inputs, 0.1, plan, scratch, shape, None, out)
    code = compile_kernel(
        decode_kernel, arguments, warps, capability, folder, fp_fusion=True, max_registers=tuning.max_registers
    )
    loops = code.loops()
    pages = max(loops, key=lambda lines: sum("HMMA" in line for line in lines))
    opcodes = Counter(opcode(line) for line in pages)
    return Compiled(
        name,
        code.registers,
        code.spilled,
        sum(opcode(line) in ("LDL", "STL") for lines in loops for line in lines),
        len(pages) * 32 / (2 * tuning.tile * head_dim),
        dict(opcodes.most_common()),
    )


def instruction(line: str) -> str:
    """With its modifiers, without its predicate."""
    words = line.split()
    return words[line.startswith("@")]


def opcode(line: str) -> str:
    """Without its predicate and modifiers."""
    return instruction(line).split(".")[0]


def whole(*shape: int) -> Tensor:
    """Numbers as `AttentionInputs` has them."""
    return torch.zeros(*shape, dtype=torch.int32)


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    print(json.dumps([asdict(compile_one(name, folder)) for name in sys.argv[2:]]))


if __name__ == "__main__":
    main()
