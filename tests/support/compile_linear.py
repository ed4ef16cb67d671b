"""Compile the linear kernel for GPUs, in a process where Triton does not interpret it.

Prints, as JSON, a list of `Compiled`. Arguments: a folder to work in, then what to compile, as
OUTPUTSxINPUTS/WEIGHTS/TOKENS/EXTRAS/CAPABILITY, where EXTRAS are `norm`, `normed`, `residual`, `bias`, joined by `+`,
or `plain`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from subten.kernels.linear.inputs import LinearWeights, NormWeights
from subten.kernels.linear.plan import LANES, LinearShape, tune_linear
from subten.kernels.linear.triton_decode import linear_arguments, linear_kernel
from support.compile_decode import opcode
from support.compile_moe import SMS, most_addends, unbacked
from support.device_code import compile_kernel


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: as in the argument.
        registers: of a thread.
        spilled: bytes.
        opcodes: how often they occur in the loop over weights.
        addends: how many floats are added up by one reduction at most.
    """

    name: str
    registers: int
    spilled: int
    opcodes: dict[str, int]
    addends: int


def operands(
    name: str,
) -> tuple[Tensor, LinearWeights, Tensor, NormWeights | None, Tensor | None, Tensor | None]:
    """Tokens, weights, result, norm, tokens after it, and residual, of OUTPUTSxINPUTS/WEIGHTS/TOKENS/EXTRAS."""
    size, kind, tokens, extras = name.split("/")[:4]
    (outputs, inputs), count = map(int, size.split("x")), int(tokens)
    dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    wide = torch.bfloat16 if kind == "fp8" else dtype
    weights = LinearWeights(
        unbacked(outputs, inputs, dtype=dtype),
        unbacked(outputs, dtype=wide) if "bias" in extras else None,
        unbacked(outputs, dtype=torch.float32) if kind == "fp8" else None,
    )
    x, out = torch.zeros(count, inputs, dtype=wide), torch.zeros(count, outputs, dtype=wide)
    norm = NormWeights(unbacked(inputs, dtype=wide), 1e-6) if "norm" in extras else None
    normed = torch.zeros_like(x) if "normed" in extras else None
    residual = torch.zeros_like(out) if "residual" in extras else None
    return x, weights, out, norm, normed, residual


def compile_one(name: str, folder: Path) -> Compiled:
    """See above."""
    x, weights, out, norm, normed, residual = operands(name)
    capability = name.rpartition("/")[2]
    shape = LinearShape(x.shape[1], out.shape[1], weights.weight.itemsize)
    tuning = tune_linear(shape, len(x), SMS)
    arguments = linear_arguments(x, weights, out, tuning, norm, normed, residual, 1.0)
    code = compile_kernel(linear_kernel, arguments, LANES, int(capability), folder, fp_fusion=True)
    loops = [Counter(map(opcode, lines)) for lines in code.loops()]
    products = [loop for loop in loops if any("MMA" in name for name in loop)]
    innermost = min(products, key=lambda loop: loop.total())
    return Compiled(name, code.registers, code.spilled, dict(innermost.most_common()), most_addends(code.ttir))


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    print(json.dumps([asdict(compile_one(name, folder)) for name in sys.argv[2:]]))


if __name__ == "__main__":
    main()
