"""Types of blocks in Triton's interpreter, worked out once: it makes them anew in every operation, which takes more
than half of its time. They are never changed, so that those of the same shape can share what they consist of."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def keep_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed stays the same."""
    make_block = tl.block_type.__init__
    known_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def block(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = element_ty.name, sizes
        if key not in known_blocks:
            make_block(self, element_ty, shape)
            known_blocks[key] = dict(vars(self))
        vars(self).update(known_blocks[key], element_ty=element_ty)

    @cache
    def extent(shape: tuple[int, ...]) -> tuple[tl.constexpr, Any]:
        return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])

    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = extent(tuple(type.shape) if type.is_block() else ())

    find_numpy = interpreter._get_np_dtype
    known_numpy: dict[str, np.dtype[Any]] = {}

    def numpy(dtype: tl.dtype) -> np.dtype[Any]:
        if dtype.name not in known_numpy:
            known_numpy[dtype.name] = find_numpy(dtype)
        return known_numpy[dtype.name]

    broadcast = TritonSemantic.broadcast_impl_value

    def to_one_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        types = left.type, right.type
        if all(type.is_block() for type in types) and tuple(types[0].shape) == tuple(types[1].shape):
            return left, right
        return broadcast(self, left, right)

    monkeypatch.setattr(tl.block_type, "__init__", block)
    # What the interpreter's builder makes of a type is that type.
    monkeypatch.setattr(tl.block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(tl.tensor, "__init__", tensor)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", to_one_shape)
