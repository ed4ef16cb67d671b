"""Memory read as fast as a GPU can, and nothing else: the ceiling that the other kernels are measured against."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8


def read_all(x: Tensor, out: Tensor, programs: int, block: int) -> None:
    """Read every element of `x` once; the bitwise exclusive-or of them all goes to `out`.

    Args:
        x: int32, contiguous, of a multiple of `block` elements and fewer than 2^31 - programs * block.
        out: int32 [1], zero.
        programs: that share the work.
        block: elements that a program has in flight, a power of two.
    """
    read_kernel[(programs,)](x, out, x.numel(), BLOCK=block, num_warps=_WARPS)


@triton.jit
def read_kernel(x, out, count, BLOCK: tl.constexpr):
    """Grid: any number of programs, which take blocks in turn."""
    offset = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total ^= tl.load(x + start + offset)
    tl.atomic_xor(out, tl.xor_sum(total, 0))
