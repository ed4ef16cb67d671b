"""Compile the Gluon linear kernel for sm_90. As compile_linear.py, without the capability in an argument."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from subten.kernels.linear.gluon_decode import linear_arguments, linear_kernel
from subten.kernels.linear.plan import LinearShape, tune_gluon_linear
from support.compile_decode import opcode
from support.compile_linear import operands
from support.compile_moe import SMS
from support.device_code import DeviceCode, compile_kernel

CAPABILITY = 90


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: as in the argument.
        steps: of a program.
        stages: how many of them are on their way at once.
        copied: whether tokens come by the copy engine.
        registers: of a thread.
        spilled: bytes.
        shared: bytes of shared memory of a program.
        opcodes: how often they occur.
        asked_before: copies into shared memory that are asked for before the kernel before has ended.
        loaded_before: likewise, loads by threads.
        loaded_last: loads by threads behind the last product.
        unguarded: copies that can come behind reads of what they overwrite without a barrier between.
    """

    name: str
    steps: int
    stages: int
    copied: bool
    registers: int
    spilled: int
    shared: int
    opcodes: dict[str, int]
    asked_before: int
    loaded_before: int
    loaded_last: int
    unguarded: list[str]


def compile_one(name: str, folder: Path) -> Compiled:
    """See above."""
    x, weights, out, norm, normed, residual = operands(name)
    shape = LinearShape(x.shape[1], out.shape[1], weights.weight.itemsize)
    tuning = tune_gluon_linear(shape, len(x), SMS)
    arguments = linear_arguments(x, weights, out, tuning, norm, normed, residual, 1.0)
    code = compile_kernel(linear_kernel, arguments, tuning.lanes, CAPABILITY, folder, fp_fusion=True)
    opcodes = [opcode(text) for _, text in code.sass]
    before = opcodes[: opcodes.index("ACQBULK")]
    last = opcodes[-opcodes[::-1].index("HMMA") :]
    return Compiled(
        name,
        shape.inputs // (tuning.lanes * tuning.step),
        tuning.stages,
        tuning.copied,
        code.registers,
        code.spilled,
        code.shared,
        dict(Counter(opcodes).most_common()),
        before.count("UTMALDG"),
        before.count("LDG"),
        last.count("LDG"),
        _unguarded(code),
    )


def _unguarded(code: DeviceCode) -> list[str]:
    return [text for read in ("LDSM", "LDS ", "LDS.") for text in code.reachable(read, "UTMALDG", "BAR.SYNC")]


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    print(json.dumps([asdict(compile_one(name, folder)) for name in sys.argv[2:]]))


if __name__ == "__main__":
    main()
