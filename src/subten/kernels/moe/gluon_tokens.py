"""Tokens of a run: from where they lie in memory to operands of the tensor core in shared memory.

There they are `staged` [steps, 2, columns of weights, tokens]: a step of the loop over gate and up takes two tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from subten.kernels.gluon_names import reinterpret
from subten.kernels.moe.gluon_plan import WARPS
from subten.kernels.moe.gluon_routing import columns_of

_WARPS = gl.constexpr(WARPS)


@gluon.constexpr_function
def _steps_at_once(steps):
    """Of tokens that are loaded and stored as one tensor: their number is a power of two."""
    return steps & -steps


@gluon.jit
def load_tokens(x, x_stride, mask, tile, staged, TOKENS: gl.constexpr):
    """The tokens of a tile of columns, for `staged`, as tensors of as many steps as can be one."""
    STEPS: gl.constexpr = staged.shape[0]
    STEP: gl.constexpr = staged.shape[2]
    COLUMNS: gl.constexpr = staged.shape[3]
    PARTS: gl.constexpr = 2 * _steps_at_once(STEPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, STEP // 8, 256 // STEP], [2, 1, _WARPS // 2], [1, 2, 0])
    column, real = columns_of(mask, tile, TOKENS, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None] * STEP
    sources = x + column[None, None, :] * x_stride + part + k
    values = ()
    for i in gl.static_range(2 * STEPS // PARTS):
        values += (gl.load(sources + i * PARTS * STEP, mask=real[None, None, :], other=0.0),)
    return values


@gluon.jit
def stage_tokens(staged, values):
    """Store what `load_tokens` has loaded. Few large tensors: there is a barrier between two."""
    COUNT: gl.constexpr = len(values)
    PARTS: gl.constexpr = values[0].shape[0]
    parts = reinterpret(staged, staged.dtype, [COUNT, PARTS, staged.shape[2], staged.shape[3]], staged.layout)
    for i in gl.static_range(COUNT):
        parts.index(i).store(_as_operand(values[i], staged.dtype))


@gluon.jit
def _as_operand(tokens, operand):
    """Tokens as operand of the tensor core. Of two in bf16, one is shifted up and one masked, which the compiler
    would do in three steps."""
    if tokens.dtype == gl.bfloat16 and operand == gl.float16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r",
            [tokens],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tokens.to(operand)
