"""What Triton has under other names from 3.7 on: those, where it has them, and the ones before."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_Memory = gl.shared_memory_descriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret
