"""How many kernels Triton has compiled: none may be, once an engine is warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def count_compilations(device: torch.device) -> Callable[[], int]:
    """Begin to count.

    Args:
        device: where the kernels run. On a CPU nothing is compiled, and Triton need not be there.

    Returns:
        What tells how many kernels the process has compiled since.
    """
    if device.type != "cuda":
        return lambda: 0
    from triton import knobs

    compiled = 0
    before = knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> bool | None:
        nonlocal compiled
        compiled += 1
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = count
    return lambda: compiled
