"""How a Gluon kernel begins while the one before it still runs: programmatic dependent launch, see `can_overlap`.

Before it waits, a kernel may read what is no result of the kernel before: weights, the pages of a cache, tables.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_previous_kernel():
    """Until all that the kernels before this one have written can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_kernel_start():
    """Its programs may begin, up to where they wait for this one's results, where there is room."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
