"""Compile the Gluon mixture of experts for sm_90. As compile_moe.py; arguments are SHAPE/WEIGHTS/TOKENS."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from subten.kernels.moe.gluon_decode import decode_arguments, moe_kernel
from subten.kernels.moe.gluon_plan import REGISTERS, SLICE, WARPS, plan_gluon_moe
from subten.kernels.moe.packing import cut_down
from subten.kernels.moe.plan import MoEShape
from subten.kernels.moe.triton_decode import MoEScratch
from support.compile_decode import opcode
from support.compile_moe import SMS, weights_of
from support.device_code import compile_kernel

CAPABILITY = 90


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: as in the argument.
        columns: tokens of a tile.
        registers: of a thread.
        allowed: that it may have.
        gate_up: opcodes of the loop over gate and up, and how often they occur.
        down: likewise, of down.
        additions: to sums in memory, once for all slices of a run.
        first: opcodes between the end of the kernel before and the first posted run, and how often they occur.
        unguarded: signs that a stage is free that can come behind reads of it without a barrier between.
    """

    name: str
    columns: int
    registers: int
    allowed: int
    gate_up: dict[str, int]
    down: dict[str, int]
    additions: int
    first: dict[str, int]
    unguarded: list[str]


def compile_one(name: str, folder: Path) -> Compiled:
    """See above."""
    shape, kind, tokens = name.split("/")
    weights, count = cut_down(weights_of(shape, kind.rstrip("+")), SLICE), int(tokens)
    of_block = MoEShape.of(weights)
    plan = plan_gluon_moe(of_block, count, SMS, "float" if kind.endswith("+") else "fixed")
    x = torch.zeros(count, of_block.hidden, dtype=torch.bfloat16)
    columns = of_block.num_experts + (weights.shared is not None and weights.shared.gate is not None)
    logits = torch.zeros(count, columns, dtype=torch.bfloat16)
    scratch = MoEScratch.allocate(plan, of_block.hidden, x.device)
    arguments = decode_arguments(x, logits, weights, plan, scratch, torch.empty_like(x))
    tuning = plan.tuning
    code = compile_kernel(
        moe_kernel,
        arguments,
        WARPS,
        CAPABILITY,
        folder,
        fp_fusion=True,
        max_registers=REGISTERS,
    )
    products = [text for text in map("\n".join, code.loops()) if "HMMA" in text]
    innermost = [text for text in products if not any(other in text for other in products if other != text)]
    # Behind them come ways back from where a warp waits for a barrier.
    gate_up, down, *_ = (Counter(map(opcode, text.split("\n"))) for text in innermost)
    texts = [text for _, text in code.sass]
    begin = next(place for place, text in enumerate(texts) if "ACQBULK" in text)
    posted = next(place for place, text in enumerate(texts) if place > begin and "SYNCS.ARRIVE" in text)
    added = next(text for text in products if "REDG" in text)
    return Compiled(
        name,
        tuning.columns,
        code.registers,
        REGISTERS,
        dict(gate_up.most_common()),
        dict(down.most_common()),
        added.count("REDG"),
        dict(Counter(map(opcode, texts[begin:posted])).most_common()),
        code.reachable("LDSM", "ARRIVE.TRANS64.A1T0", "BAR.SYNC"),
    )


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    print(json.dumps([asdict(compile_one(name, folder)) for name in sys.argv[2:]]))


if __name__ == "__main__":
    main()
