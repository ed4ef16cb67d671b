from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from subten.kernels.compilations import count_compilations

KERNEL = """
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from subten.kernels.compilations import count_compilations


@dataclass(frozen=True)
class Shape:
    size: int


@triton.jit
def kernel(x, SHAPE: tl.constexpr):
    tl.store(x + tl.arange(0, SHAPE.size), 1.0)


heard = []
triton.knobs.compilation.listener = lambda **compiled: heard.append(compiled)
first = count_compilations(torch.device("cuda"))
for size in (16, 32):
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "SHAPE": "constexpr"}, constexprs={"SHAPE": Shape(size)})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    if size == 16:
        second = count_compilations(torch.device("cuda"))
print(first(), second(), len(heard), triton.knobs.runtime.jit_post_compile_hook)
"""


def test_kernels_are_counted_and_compiled_whatever_their_constants_are(tmp_path: Path) -> None:
    """Whoever listened before goes on listening. No hook is set for which constants would have to be JSON."""
    script = tmp_path / "compile_two.py"
    script.write_text(KERNEL)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    child = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["2", "1", "2", "None"]


def test_nothing_is_compiled_for_a_cpu() -> None:
    assert count_compilations(torch.device("cpu"))() == 0
