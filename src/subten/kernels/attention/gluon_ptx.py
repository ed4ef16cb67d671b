"""Steps of the Gluon decode kernel that are one or a few PTX instructions.

Codes become operands of the tensor core by one AND for two or four of them. What the compiler makes of the same in
Gluon takes words apart first, and takes several instructions per code.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _ptx(x, CODE: gl.constexpr, OPERANDS: gl.constexpr, DTYPE: gl.constexpr, PACK: gl.constexpr):
    """One register of `x` ($1), PACK elements, to one of the result ($0)."""
    return gl.inline_asm_elementwise(CODE, OPERANDS, [x], dtype=DTYPE.value, is_pure=True, pack=PACK)


@gluon.constexpr_function
def shifted_field(shift, mask):
    """The bits of a register under a mask, after a shift to the right."""
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, {mask}; }}"


@gluon.constexpr_function
def key_plane_ptx(plane):
    """See `key_plane`."""
    return shifted_field(plane // 2 * 4, (3 << plane % 2 * 2) * 0x01010101)


@gluon.jit
def key_plane(words, PLANE: gl.constexpr):
    """Codes of one plane of the keys' bytes, as int8: times 1 (even planes) or 4."""
    return _ptx(words, key_plane_ptx(PLANE), "=r,r", gl.int8, 4)


@gluon.constexpr_function
def value_plane_ptx(plane):
    """See `value_plane`."""
    return shifted_field(plane // 5 * 10, (3 << plane % 5 * 2) * 0x10001)


@gluon.jit
def value_plane(words, PLANE: gl.constexpr):
    """Codes of one plane of the values' words, as fp16: times 2^-24 (subnormal numbers) and 4^(plane % 5)."""
    return _ptx(words, value_plane_ptx(PLANE), "=r,r", gl.float16, 2)


@gluon.jit
def exp2(x):
    """2^x, subnormal numbers as zero."""
    return _ptx(x, "ex2.approx.ftz.f32 $0, $1;", "=f,f", gl.float32, 1)


@gluon.jit
def small_float(x):
    """An int32 of less than 2^22 as a float32: a conversion would take four times the issue slots."""
    return float_of_bits(x + 0x4B400000) - 12582912.0


@gluon.jit
def float_of_bits(x):
    """An int32 as the float32 of the same bits."""
    return _ptx(x, "mov.b32 $0, $1;", "=f,r", gl.float32, 1)


@gluon.jit
def grid_scale(words):
    """fp16 scales of packed words, two at a time."""
    return _ptx(words, "{.reg .b32 t; shr.u32 t, $1, 1; and.b32 $0, t, 0x7FE07FE0;}", "=r,r", gl.float16, 2)


@gluon.jit
def grid_offset(words):
    """fp16 offsets of packed words from the lower end of the grid, in eighths of the scale: 0x6400 is 1024 as a fp16,
    with an integer in its low bits, and 0x642C is 1024 and the 44 of an offset of zero."""
    return _ptx(
        words,
        "{ .reg .b32 t, c; lop3.b32 t, $1, 0x003F003F, 0x64006400, 0xEA; "
        "mov.b32 c, 0x642C642C; sub.rn.f16x2 $0, t, c; }",
        "=r,r",
        gl.float16,
        2,
    )


@gluon.jit
def low_half(x):
    """The lower fp16 of an int32, as float32."""
    return _ptx(x, "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", "=f,r", gl.float32, 1)


@gluon.jit
def high_half(x):
    """The upper fp16 of an int32, as float32."""
    return _ptx(x, "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", "=f,r", gl.float32, 1)


@gluon.jit
def transposed(x):
    """Each 8 x 8 fragment, transposed across the lanes of its warp."""
    return _ptx(x, "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", x.dtype, 2)


@gluon.constexpr_function
def prefetch_ptx(size):
    """See `prefetch`: by one lane."""
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0; }}"
    )


@gluon.jit
def prefetch(address, SIZE: gl.constexpr):
    """Bring SIZE bytes per warp into the L2 cache: the whole of the page that it reads next."""
    gl.inline_asm_elementwise(
        prefetch_ptx(SIZE), "=r,l", [address.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


_RAISE = gl.constexpr("""{
.reg .pred p; .reg .f32 t, u;
sub.f32 t, $2, $3; setp.gt.f32 p, t, 0f40800000;
mov.f32 $0, $3; mov.f32 $1, 0f3F800000;
vote.sync.any.pred p, p, 0xffffffff;
@!p bra SAME;
mov.f32 t, $2;
shfl.sync.bfly.b32 u, t, 4, 0x1f, 0xffffffff; max.f32 t, t, u;
shfl.sync.bfly.b32 u, t, 8, 0x1f, 0xffffffff; max.f32 t, t, u;
shfl.sync.bfly.b32 u, t, 16, 0x1f, 0xffffffff; max.f32 t, t, u;
max.f32 $0, $3, t; sub.f32 t, $3, $0; ex2.approx.ftz.f32 $1, t;
SAME:
}""")


@gluon.jit
def raised(largest, highest):
    """A new running maximum per head, and the decay of older sums. `largest` is each lane's.

    Both change only when the maximum of some head has risen by more than 4: sums in float32 and weights in fp16 bear
    weights of up to 2^4 instead of 1, and mostly nothing is left to do.
    """
    return gl.inline_asm_elementwise(
        _RAISE, "=&f,=&f,f,f", [largest, highest], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


_SUMS = 16
"""Registers of the four tensors that `decayed` takes at a time."""


@gluon.constexpr_function
def decay_ptx():
    """See `decayed`. The two operands behind the sums are the decays of a lane's two columns."""
    lines = [
        f"setp.ne.f32 p, ${2 * _SUMS}, 0f3F800000;",
        f"setp.ne.or.f32 p, ${2 * _SUMS + 1}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra SAME;",
        *(f"mul.f32 ${i}, ${i}, ${2 * _SUMS + i % 2};" for i in range(_SUMS)),
    ]
    return "{ .reg .pred p;\n" + "\n".join(lines) + "\nSAME:\n}"


@gluon.constexpr_function
def decay_constraints():
    """Results in the registers of the operands."""
    return ",".join(["=f"] * _SUMS + [str(i) for i in range(_SUMS)] + ["f"] * 4)


@gluon.jit
def decayed(sums, decay):
    """Four sums [warps, rows, 8] times a decay of the same shape: one test for all, since mostly nothing decays."""
    return gl.inline_asm_elementwise(
        decay_ptx(),
        decay_constraints(),
        [sums[0], sums[1], sums[2], sums[3], decay],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=4,
    )
