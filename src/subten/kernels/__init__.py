"""The operations of a decoder: a torch reference for each, faster implementations beside it, their costs.

One file per small operation, one folder per large one. `select.py` chooses an implementation per operation
once, when a model is built or a cache allocated, and logs the choice. Kernels take tensors, never a cache or a model.

Beside each reference stand its costs, as pure functions of the shapes:

- ``*_flops``: floating-point operations, a multiply-add counted as two, a division or root as one.
  Operations with a matrix product count the products only, as rooflines do.
- ``*_bytes``: the compulsory memory traffic, that is each operand read once and the result written once. An
  implementation that moves more than this has headroom; none can move less.
"""

from subten.kernels.select import (
    OPERATIONS,
    REGISTRY,
    Implementation,
    Kernels,
    Use,
    select_attention,
    select_kernels,
)

__all__ = ["OPERATIONS", "REGISTRY", "Implementation", "Kernels", "Use", "select_attention", "select_kernels"]
