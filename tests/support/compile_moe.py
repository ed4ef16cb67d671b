"""Compile the one-launch mixture of experts for GPUs, in a process where Triton does not interpret it.

Prints, as JSON, a list of `Compiled`. Arguments: a folder to work in, then what to compile, as
SHAPE/WEIGHTS/ACTIVATIONS/TOKENS/CAPABILITY, with `+` behind WEIGHTS for sums in float32.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from subten.kernels.moe import MoEWeights, RouterSpec, SharedExpertWeights
from subten.kernels.moe.plan import MoEShape, plan_moe
from subten.kernels.moe.triton_decode import MoEScratch, decode_arguments, moe_kernel
from support.compile_decode import opcode
from support.device_code import compile_kernel

SMS = 132
SHAPES = {
    "fine": (RouterSpec(128, 8, True), 2048, 768, 0),
    "coarse": (RouterSpec(8, 2, True), 4096, 9728, 0),
    "shared": (RouterSpec(64, 4, False), 2048, 1408, 5632),
    "sigmoid": (RouterSpec(160, 8, True, "sigmoid", 2.5), 4096, 1408, 1408),
}


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: as in the argument.
        registers: of a thread.
        spilled: bytes.
        opcodes: how often they occur in the two shortest loops with matrix products.
        sums: what happens between one barrier and the next, where anything does: "read" and "clear".
        addends: how many floats are added up by one reduction at most.
    """

    name: str
    registers: int
    spilled: int
    opcodes: list[dict[str, int]]
    sums: list[list[str]]
    addends: int


def unbacked(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory: only its type and shape are looked at."""
    return torch.empty(shape, dtype=dtype, device="meta")


def weights_of(shape: str, kind: str) -> MoEWeights:
    """In "bf16", or in FP8 with scales by "channel" or "block"."""
    rule, hidden, width, shared_width = SHAPES[shape]
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn

    def scale(rows: int, columns: int, halves: int, *experts: int) -> Tensor | None:
        if kind == "bf16":
            return None
        sizes = (rows,) if kind == "channel" else (halves * -(-rows // halves // 128), -(-columns // 128))
        return unbacked(*experts, *sizes, dtype=torch.float32)

    shared = None
    if shared_width:
        shared = SharedExpertWeights(
            unbacked(2 * shared_width, hidden, dtype=dtype),
            unbacked(hidden, shared_width, dtype=dtype),
            unbacked(1, hidden, dtype=torch.bfloat16) if rule.scoring == "softmax" else None,
            scale(2 * shared_width, hidden, 2),
            scale(hidden, shared_width, 1),
        )
    return MoEWeights(
        rule,
        unbacked(rule.num_experts, hidden, dtype=torch.bfloat16),
        unbacked(rule.num_experts, 2 * width, hidden, dtype=dtype),
        unbacked(rule.num_experts, hidden, width, dtype=dtype),
        shared,
        scale(2 * width, hidden, 2, rule.num_experts),
        scale(hidden, width, 1, rule.num_experts),
        unbacked(rule.num_experts, dtype=torch.float32) if rule.scoring == "sigmoid" else None,
    )


def uses_of_sums(lines: Iterable[str]) -> list[list[str]]:
    """See `Compiled.sums`: nothing else is loaded past the L1, or set to zero, several elements at a time."""
    uses: list[set[str]] = [set()]
    for line in lines:
        if re.search(r"\bBAR\.SYNC", line):
            uses.append(set())
        elif re.search(r"\bLDG\.E\.(?:64|128)\.STRONG\.GPU", line):
            uses[-1].add("read")
        elif re.search(r"\bSTG\.E\.(?:64|128) .*, RZ\b", line):
            uses[-1].add("clear")
    return [sorted(between) for between in uses if between]


def most_addends(ttir: str) -> int:
    """See `Compiled.addends`."""
    shape_of_sum = re.compile(r".*?axis = (\d).*?arith\.addf.*?\}\) : \(tensor<([\dx]+)xf32>\) ->", re.DOTALL)
    reductions = (part.split(") ->")[0] + ") ->" for part in ttir.split('"tt.reduce"')[1:])
    found = [match.groups() for match in map(shape_of_sum.match, reductions) if match]
    return max(int(shape.split("x")[int(axis)]) for axis, shape in found)


def compile_one(name: str, folder: Path) -> Compiled:
    """See above."""
    shape, kind, activations, tokens, capability = name.split("/")
    weights, count = weights_of(shape, kind.rstrip("+")), int(tokens)
    of_block = MoEShape.of(weights)
    plan = plan_moe(of_block, count, SMS, activations, "float" if kind.endswith("+") else "fixed")
    x = torch.zeros(count, of_block.hidden, dtype=torch.bfloat16)
    columns = of_block.num_experts + (weights.shared is not None and weights.shared.gate is not None)
    scratch = MoEScratch.allocate(plan, of_block.hidden, x.device)
    logits = torch.zeros(count, columns, dtype=torch.bfloat16)
    arguments = decode_arguments(x, logits, weights, plan, scratch, torch.empty_like(x))
    tuning = plan.tuning
    code = compile_kernel(
        moe_kernel,
        arguments,
        tuning.warps,
        int(capability),
        folder,
        fp_fusion=True,
        stages=tuning.stages,
        max_registers=tuning.registers,
    )
    loops = [Counter(map(opcode, lines)) for lines in code.loops()]
    products = [loop for loop in loops if any(name.endswith("MMA") for name in loop)]
    innermost = sorted(products, key=lambda loop: loop.total())[:2]
    return Compiled(
        name,
        code.registers,
        code.spilled,
        [dict(loop.most_common()) for loop in innermost],
        uses_of_sums(text for _, text in code.sass),
        most_addends(code.ttir),
    )


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    print(json.dumps([asdict(compile_one(name, folder)) for name in sys.argv[2:]]))


if __name__ == "__main__":
    main()
