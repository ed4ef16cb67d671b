"""Where Triton's interpreter computes something else than a GPU, put right for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def correct_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions to bf16 and FP8 round to the nearest, and dots of bf16 and FP8 multiply numbers and not bits;
    sums of a dot are exact before they are rounded, so that they do not depend on the shape of the operands. A
    multiply-add rounds once."""

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        tensor = _tensor(values, source).to(_TYPES[target.name])
        bits = tensor.view(torch.uint8).numpy().view(_BITS[target.primitive_bitwidth])
        return bits.reshape(values.shape)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        left, right = (_tensor(x.data, x.dtype.scalar).double().numpy() for x in (a, b))
        sums = np.matmul(left, right) + d.data
        return interpreter.TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _tensor(values: Any, dtype: tl.dtype) -> torch.Tensor:
    stored = np.ascontiguousarray(values)
    flat = torch.from_numpy(stored.reshape(-1).view(np.uint8)).view(_TYPES[dtype.name])
    return flat.view(stored.shape)
