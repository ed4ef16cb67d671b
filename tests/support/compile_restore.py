"""Compile the kernel that restores experts for GPUs, in a process where Triton does not interpret it.

Prints, as JSON, what came of it for each compute capability and shape. Argument: a folder to work in.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch

from subten.kernels.moe.triton_restore import ROWS_OF_A_TILE, WARPS, restore_kernel
from support.device_code import compile_kernel

SHAPES = (
    {"ROWS": 1536, "COLUMNS": 2048, "HALF": 768, "WIDTH": 2048, "BY_BLOCK": True},
    {"ROWS": 4096, "COLUMNS": 9728, "HALF": 4096, "WIDTH": 64, "BY_BLOCK": False},
    {"ROWS": 4096, "COLUMNS": 9728, "HALF": 4096, "WIDTH": 64, "BY_BLOCK": False, "scales": None},
)
"""The last is of experts in 16 bit, which have no scales."""


def compile_one(capability: int, sizes: dict[str, int | bool | None], folder: Path) -> dict[str, object]:
    """Loads and stores of global memory by instruction, and bytes that were spilled."""
    wide = "scales" in sizes
    arguments = {
        "codes": torch.empty(0, dtype=torch.bfloat16 if wide else torch.float8_e4m3fn),
        "scales": torch.empty(0),
        "out": torch.empty(0, dtype=torch.bfloat16),
        "TILE": ROWS_OF_A_TILE,
        "BLOCK": 128,
        **sizes,
    }
    code = compile_kernel(restore_kernel, arguments, WARPS, capability, folder, fp_fusion=True)
    found = re.findall(r"\b(?:LDG|STG)\S*", "\n".join(text for _, text in code.sass))
    loads, stores = (dict(Counter(name for name in found if name.startswith(kind))) for kind in ("LDG", "STG"))
    return {"capability": capability, "wide": wide, "spilled": code.spilled, "loads": loads, "stores": stores}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps([compile_one(capability, sizes, folder) for capability in (89, 90, 100) for sizes in SHAPES]))
