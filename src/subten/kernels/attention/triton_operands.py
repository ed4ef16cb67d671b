"""Codes of a page record as operands of the tensor core, without arithmetic.

An AND leaves one code of a word where it is, and these bits read as a fp16 (a subnormal one, which tensor cores
multiply exactly) are the code times a power of two; the other operand and the result carry the inverse. One 32-bit
AND serves two words, since the codes of one plane lie at the same bits of all words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from subten.formats.affine import OFFSET_BITS, OFFSETS_PER_STEP

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_F16_MANTISSA = 10
_OFFSET_MASKS = tl.constexpr(((1 << OFFSET_BITS) - 1) * 0x10001)
OFFSET_STEP = tl.constexpr(1 / OFFSETS_PER_STEP)


@triton.constexpr_function
def _fields(plane, bits):
    """The bits of a word that make the fp16 operand of its code in `plane`: (shift to the right, mask), ...

    Codes of 2 and 4 bits stay where they are if that is within a fp16's mantissa, else all move down alike. Of an
    e4m3, sign, and exponent with mantissa, move to where a fp16 has them.
    """
    if bits == 8:
        return ((8 * plane - 8, 0x8000), (8 * plane - 7, 0x3F80))
    in_place = _F16_MANTISSA // bits
    return ((plane // in_place * in_place * bits, ((1 << bits) - 1) << (plane % in_place * bits)),)


@triton.constexpr_function
def factor(plane, bits):
    """What an operand of `plane` lacks to be its code, but for `common_factor`."""
    return 1.0 if bits == 8 else 2.0 ** -(plane % (_F16_MANTISSA // bits) * bits)


@triton.constexpr_function
def common_factor(bits):
    """What operands of all planes lack: fp16's exponent bias is 8 above that of e4m3, its least number is 2^-24."""
    return 2.0**8 if bits == 8 else 2.0**24


@triton.constexpr_function
def headroom(bits):
    """By how many powers of two the weights of values are raised, so that small scales times small weights do not
    fall below the normal fp16 numbers. A scale of e4m3 is 448 times smaller than the largest element of a row."""
    return 8 if bits == 8 else 0


@triton.constexpr_function
def _operand_ptx(plane, bits):
    """`_fields` of the two words in a register. A bit that moves into the other word falls under no mask."""
    lines = [".reg .b32 field; mov.b32 $0, 0;"]
    for shift, mask in _fields(plane, bits):
        lines += [f"shr.b32 field, $1, {shift};" if shift >= 0 else f"shl.b32 field, $1, {-shift};"]
        lines += [f"and.b32 field, field, {mask * 0x10001};", "or.b32 $0, $0, field;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _interpreted_operand(words, plane, bits):
    """`_fields` as the interpreter, which has no PTX, can take them."""
    moved_bits = words & 0
    for shift, mask in _fields(plane, bits):
        moved = words >> shift if shift >= 0 else words << -shift
        moved_bits |= moved & (mask if mask < 0x8000 else mask - 0x10000)
    return moved_bits


@triton.jit
def operand(words, PLANE: tl.constexpr, BITS: tl.constexpr):
    """The codes of one plane as fp16.

    In PTX, since LLVM takes a pair of words apart before it ANDs them: 640 instructions more per page and head of
    `kv2`, where all others are 790.
    """
    if _INTERPRETED:
        return _interpreted_operand(words, PLANE, BITS).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _operand_ptx(PLANE, BITS), "=&r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def wide_product(x, y):
    """Of two int32, in 64 bits.

    In PTX, as one instruction: LLVM widens a factor that a loop does not change ahead of the loop, and multiplies 64
    bits by 64 bits in it.
    """
    if _INTERPRETED:
        return x.to(tl.int64) * y
    else:
        return tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [x, y], dtype=tl.int64, is_pure=True, pack=1
        )


@triton.jit
def bf16_operand(bits):
    """Elements in bfloat16 as fp16; beyond its range they become infinite."""
    return bits.to(tl.bfloat16, bitcast=True).to(tl.float16)


@triton.jit
def load_words(plane, token, inside, WORDS: tl.constexpr, INDEX: tl.constexpr):
    """Word INDEX of the 32-bit words of tokens [lanes, n], of which each has WORDS.

    Args:
        plane: pointer to int16 [lanes], where the plane begins in each lane's record.
        token: int32 [lanes, n].
        inside: [lanes], whether there is a record.
    """
    plane = plane.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(plane[:, None] + token * WORDS + INDEX, mask=inside[:, None], other=0)


@triton.jit
def load_pairs(plane, first, inside, TILE: tl.constexpr):
    """The 16-bit words of TILE slots, two tokens in one of 32 bits: [lanes, TILE / 16, 8].

    In loads of less than 32 bits nothing can be in flight while another tile is worked on. The eight tokens that
    lie at equal places of eight neighbouring slots are neighbours here: see `split_pairs`.

    Args:
        plane: see `load_words`.
        first: int32 [lanes], the token in the first of these slots.
        inside: see `load_words`.
    """
    plane = plane.to(tl.pointer_type(tl.int32), bitcast=True)
    pair, row = tl.arange(0, TILE // 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    return tl.load((plane + first // 2)[:, None, None] + row * 4 + pair, mask=inside[:, None, None], other=0)


@triton.jit
def split_pairs(pairs, TILE: tl.constexpr):
    """fp16 numbers in the two halves of `load_pairs`, as float32 [lanes, TILE] in the order of the slots."""
    halves = tl.permute(tl.join(low_f16(pairs), high_f16(pairs)), (0, 1, 3, 2))
    return tl.reshape(halves, [pairs.shape[0], TILE])


@triton.jit
def low_f16(words):
    """Float32 of the fp16 in the lower half of 32-bit words."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_f16(words):
    """Float32 of the fp16 in the upper half of 32-bit words."""
    return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _zero_steps(bits):
    """A packed offset of zero as `load_grid` reads it: from the lower end of the grid, in steps, and 1024 more."""
    return 1024 + (1 << (OFFSET_BITS - 1)) + OFFSETS_PER_STEP * ((1 << bits) - 1) / 2


@triton.jit
def load_grid(plane, first, token, inside, TILE: tl.constexpr, SIDE: tl.constexpr):
    """Scale and offset of tokens, float32 [lanes, TILE]; a packed grid's offset counts in `OFFSET_STEP` scales.

    Of tokens that nobody wrote they may be NaN, but for a packed offset.
    """
    if SIDE.grid == "fp16":
        words = load_words(plane, token, inside, 1, 0)
        return low_f16(words), high_f16(words)
    else:
        pairs = load_pairs(plane, first, inside, TILE)
        if SIDE.grid == "packed":
            # 0x6400 is 1024 as a fp16, with an integer in the low bits: cheaper than a conversion.
            steps = split_pairs((pairs & _OFFSET_MASKS) | 0x64006400, TILE) - _zero_steps(SIDE.bits)
            return split_pairs((pairs >> 1) & 0x7FE07FE0, TILE), steps
        else:
            scale = split_pairs(pairs, TILE)
            return scale, tl.zeros_like(scale)
