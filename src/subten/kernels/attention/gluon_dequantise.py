"""Pages of `kv2` as tiles of float16 in shared memory: the warps of gluon_prefill.py that dequantise.

A shift, an AND-OR, a subtraction and a fused multiply-add make two numbers of two codes. Until they are in shared
memory, where the tensor core reads pairs of float16, pairs are integers of 32 bits: of float16, the compiler takes
pairs apart and puts them together again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated", no-warn-unreachable

from __future__ import annotations

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from subten.formats.affine import OFFSET_BITS, OFFSETS_PER_STEP
from subten.formats.packing import WORD_BITS
from subten.formats.spec import PAGE_SIZE
from subten.kernels.gluon_names import reinterpret

PRODUCERS = gl.constexpr(4)
"""Warps that dequantise."""
STAGES = gl.constexpr(2)
"""Pages that shared memory has room for."""
TILE = gl.constexpr(PAGE_SIZE)
PAIRS = gl.constexpr(PAGE_SIZE // 2)
"""Of neighbouring slots of a page."""
KEPT = gl.constexpr(16)
"""Columns of the two kept channels, most of them zero: a tensor core sums over 16 at least."""
_PLANES = gl.constexpr(WORD_BITS // 2)
"""Codes of a word of 16 bits."""
_1024 = gl.constexpr(0x64006400)
"""Twice 1024 as a float16: an integer in its low bits is added to it."""


# --- two numbers in one register -------------------------------------------------------------------------------


@gluon.constexpr_function
def _twice(x):
    """A float16 in both halves of a register."""
    return int(np.float16(x).view(np.uint16)) * 0x10001


@gluon.jit
def _ptx(CODE: gl.constexpr, x):
    """Registers to a register, which holds an integer."""
    CONSTRAINTS: gl.constexpr = "=r" + ",r" * len(x)
    return gl.inline_asm_elementwise(CODE, CONSTRAINTS, x, dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _plane_ptx(plane):
    """Codes of a plane, times scales plus offsets; $4 is `_1024`."""
    return (
        f"{{ .reg .b32 t; shr.u32 t, $1, {2 * plane}; lop3.b32 t, t, 0x00030003, $4, 0xEA; "
        "sub.rn.f16x2 t, t, $4; fma.rn.f16x2 $0, t, $2, $3; }"
    )


@gluon.constexpr_function
def _scale_ptx():
    """As `load_affine` of subten/formats/affine.py."""
    mask = (0x7FFF >> (OFFSET_BITS - 1) << (OFFSET_BITS - 1)) * 0x10001
    return f"{{ .reg .b32 t; shr.u32 t, $1, 1; and.b32 $0, t, {mask}; }}"


@gluon.constexpr_function
def _offset_ptx():
    """Likewise; $2 is the scale, and all but the last product is exact."""
    mask = ((1 << OFFSET_BITS) - 1) * 0x10001
    lowest = (1024 + (1 << (OFFSET_BITS - 1))) / OFFSETS_PER_STEP + 1.5
    return (
        f"{{ .reg .b32 t, c, d; mov.b32 c, 0x64006400; lop3.b32 t, $1, {mask}, c, 0xEA; "
        f"mov.b32 c, {_twice(1 / OFFSETS_PER_STEP)}; mov.b32 d, {_twice(-lowest)}; "
        "fma.rn.f16x2 t, t, c, d; mul.rn.f16x2 $0, t, $2; }"
    )


_COS_OF_SUM = gl.constexpr("{ .reg .b32 t; mul.rn.f16x2 t, $2, $4; neg.f16x2 t, t; fma.rn.f16x2 $0, $1, $3, t; }")
"""From cos and sin of one angle, and those of another."""
_SIN_OF_SUM = gl.constexpr("{ .reg .b32 t; mul.rn.f16x2 t, $1, $4; fma.rn.f16x2 $0, $2, $3, t; }")


@gluon.jit
def _rounded(low, high):
    """Two float32 as float16 in one register."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(low, high):
    """Two numbers of 16 bits in one of 32."""
    return (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)


@gluon.jit
def _dequantised(words, grids):
    """Words [a, b] of codes with grids of the same shape, as pairs of float16 [a, b, planes]."""
    scale = _ptx(_scale_ptx(), [grids])
    offset = _ptx(_offset_ptx(), [grids, scale])
    both = gl.full_like(words, _1024)
    _, scale = gl.broadcast(words, scale)
    _, offset = gl.broadcast(words, offset)
    x = ()
    for plane in gl.static_range(_PLANES):
        x += (_ptx(_plane_ptx(plane), [words, scale, offset, both]),)
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    return gl.reshape(gl.join(even, odd), [words.shape[0], words.shape[1], _PLANES])


@gluon.jit
def token_in(slot):
    """Which token of a page a slot holds."""
    return slot % 8 * 8 + slot // 8


# --- shared memory ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def lines(columns, bits):
    """Of rows of so many numbers, as the tensor core reads them."""
    line = min(128, columns * bits // 8)
    return gl.NVMMASharedLayout(swizzle_byte_width=line, element_bitwidth=bits, rank=2)


@gluon.jit
def stage_of(turn):
    """Where the turn-th page lies, and the phase of a barrier that says something of it."""
    return turn % STAGES, turn // STAGES & 1


@gluon.jit
def as_float16(memory, turn):
    """The turn-th page's pairs as rows of float16, transposed."""
    pairs = memory.index(turn % STAGES)
    SHAPE: gl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    return reinterpret(pairs, gl.float16, SHAPE, lines(SHAPE[1], 16)).permute((1, 0))


# --- dequantising ----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _key_layout(head_dim):
    """[64 slots, words]: each lane of a warp has a row of its own, since what they store at a time is to lie in
    different banks."""
    return gl.BlockedLayout([1, head_dim // 32], [32, 1], [2, PRODUCERS.value // 2], [1, 0])


@gluon.constexpr_function
def _value_layout():
    """[words, 32 pairs of slots]: eight lanes store a line of 128 bytes."""
    return gl.BlockedLayout([1, 4], [4, 8], [PRODUCERS.value, 1], [1, 0])


@gluon.constexpr_function
def _turns_layout(mean_pairs):
    """[64 slots, pairs of rotary pairs]: a thread has few of them, whose angles it reads anew for each page."""
    lanes = max(1, min(16, mean_pairs // 4))
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [PRODUCERS.value, 1], [1, 0])


@gluon.jit
def _asked(pages, number, pages_page, starts, page, channels, PLACES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """All that there is to load for a page."""
    K: gl.constexpr = _key_layout(HEAD_DIM)
    V: gl.constexpr = _value_layout()
    record = pages + number.to(gl.int64) * pages_page
    words = record.to(gl.pointer_type(gl.int32), bitcast=True)
    WORDS: gl.constexpr = HEAD_DIM // _PLANES
    slot = gl.arange(0, TILE, layout=gl.SliceLayout(1, K))
    word = gl.arange(0, WORDS // 2, layout=gl.SliceLayout(0, K))
    keys = gl.load(words + PLACES.key_codes // 2 + slot[:, None] * (WORDS // 2) + word[None, :])
    key_grids = gl.load(record + PLACES.key_grids + token_in(slot))
    kept = gl.load(words + PLACES.kept_pair // 2 + token_in(slot))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, V))
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, V))
    values = gl.load(words + PLACES.value_codes // 2 + word[:, None] * PAIRS + pair[None, :])
    low = gl.load(record + PLACES.value_grids + token_in(2 * pair))
    high = gl.load(record + PLACES.value_grids + token_in(2 * pair + 1))
    turns = ()
    for i in gl.static_range(len(channels)):
        place = starts + page * HEAD_DIM + 2 * channels[i]
        turns += (gl.load(place), gl.load(place + 1))
    return keys, key_grids, kept, values, low, high, turns


@gluon.jit
def _within(mean_pairs, rotation, COUNT: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Rotary pairs, first and second ones of two in a register; cos and sin from a page's first token to those in its
    slots. COLUMNS are filled up with what is multiplied by zero."""
    T: gl.constexpr = _turns_layout(COLUMNS)
    column = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, T)) * 2
    first = gl.load(mean_pairs + column, mask=column < COUNT, other=0)
    second = gl.load(mean_pairs + column + 1, mask=column < COUNT, other=0)
    cos = rotation + token_in(gl.arange(0, TILE, layout=gl.SliceLayout(1, T)))[:, None] * (HEAD_DIM // 2)
    sin = cos + TILE * (HEAD_DIM // 2)
    within = (
        _halves(gl.load(cos + first[None, :]), gl.load(cos + second[None, :])),
        _halves(gl.load(sin + first[None, :]), gl.load(sin + second[None, :])),
    )
    return (first, second), within


@gluon.jit
def _turned(turns, within):
    """Cosines, and behind them sines, at a page's tokens: from those at its first one, and those within the page."""
    _, cos = gl.broadcast(within[0], _rounded(turns[0], turns[2])[None, :])
    _, sin = gl.broadcast(within[0], _rounded(turns[1], turns[3])[None, :])
    angles = [cos, sin, within[0], within[1]]
    both = gl.permute(gl.join(_ptx(_COS_OF_SUM, angles), _ptx(_SIN_OF_SUM, angles)), [0, 2, 1])
    return gl.reshape(both, [both.shape[0], 2 * both.shape[2]])


@gluon.jit
def dequantise(
    pages,
    table,
    first,
    end,
    last_token,
    pages_page,
    mean_pairs,
    starts,
    rotation,
    memory,
    PLACES: gl.constexpr,
    SINKS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    MEAN_PAIRS: gl.constexpr,
):
    """Pages `first` to `end`, one after the other, into shared memory: keys, kept channels, the turns of the mean key
    and values. Tokens from `last_token` on, which may hold anything, have values of zero."""
    keys, kept_keys, turned, values, full_keys, free_keys, full_values, free_values = memory
    K: gl.constexpr = _key_layout(HEAD_DIM)
    channels, within = (), ()
    if MEAN_PAIRS:
        channels, within = _within(mean_pairs, rotation, MEAN_PAIRS, turned.shape[2], HEAD_DIM)
    number = gl.load(table + first)
    asked = _asked(pages, number, pages_page, starts, first, channels, PLACES, HEAD_DIM)
    number = gl.load(table + gl.minimum(first + 1, end - 1))
    for page in range(first, end):
        key_words, key_grids, kept, value_words, low, high, turns = asked
        later = gl.minimum(page + 1, end - 1)
        asked = _asked(pages, number, pages_page, starts, later, channels, PLACES, HEAD_DIM)
        number = gl.load(table + gl.minimum(page + 2, end - 1))
        place, phase = stage_of(page - first)

        numbers = _dequantised(key_words, _halves(key_grids, key_grids)[:, None])
        kept = gl.where(gl.arange(0, KEPT // 2, layout=gl.SliceLayout(0, K))[None, :] == 0, kept[:, None], 0)
        mbarrier.wait(free_keys.index(place), phase ^ 1)
        keys.index(place).store(gl.reshape(numbers, [TILE, HEAD_DIM // 2]))
        kept_keys.index(place).store(kept)
        if MEAN_PAIRS:
            turned.index(place).store(_turned(turns, within))
        fence_async_shared()
        mbarrier.arrive(full_keys.index(place), count=1)

        grids = _halves(low, high)
        if SINKS + (page + 1) * TILE > last_token:
            V: gl.constexpr = gl.SliceLayout(0, _value_layout())
            token = SINKS + page * TILE + token_in(2 * gl.arange(0, PAIRS, layout=V))
            grids = gl.where(token < last_token, grids, grids & ~0xFFFF)
            grids = gl.where(token + 8 < last_token, grids, grids & 0xFFFF)
        numbers = gl.permute(_dequantised(value_words, grids[None, :]), [0, 2, 1])
        mbarrier.wait(free_values.index(place), phase ^ 1)
        values.index(place).store(gl.reshape(numbers, [HEAD_DIM, PAIRS]))
        fence_async_shared()
        mbarrier.arrive(full_values.index(place), count=1)
