"""Routing in the registers of every program: which tokens visit which expert, and whose a place is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LOG2_E = gl.constexpr(math.log2(math.e))
_NO_KEY = gl.constexpr(-(2**31))


@gluon.constexpr_function
def grid_layout(experts, warps):
    """Of [tokens, experts]: every token belongs to one warp, its experts to all lanes."""
    return gl.BlockedLayout([1, experts // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def experts_layout(experts, warps):
    """Of [experts]: every warp has all of them, in its lanes."""
    return gl.BlockedLayout([experts // 32], [32], [warps], [0])


@gluon.jit
def _score(logit, SHAPE: gl.constexpr):
    """What experts are ranked by, but for a correction."""
    if SHAPE.scoring == "sigmoid":
        return 1 / (1 + gl.exp2(logit * -_LOG2_E))
    else:
        return logit


@gluon.jit
def _rank_key(score):
    """int32 in the order of the scores, above `_NO_KEY`."""
    bits = (score + 0.0).to(gl.int32, bitcast=True)
    return gl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NO_KEY + 1)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _halves(mask):
    """The lower and the upper 32 bits of an int64."""
    return mask.to(gl.int32), (mask >> 32).to(gl.int32)


@gluon.jit
def bits_set(mask):
    """How many bits of an int32 or int64 are set."""
    if mask.dtype == gl.int64:
        return gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [mask], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def place_of_bit(mask, rank, TOKENS: gl.constexpr):
    """Where the bit of `mask` is that has `rank` set bits below it, for one that exists."""
    place = gl.zeros_like(rank)
    if mask.dtype == gl.int64:
        lower, upper = _halves(mask)
        below = bits_set(lower)
        beyond = rank >= below
        rank = gl.where(beyond, rank - below, rank)
        place = gl.where(beyond, 32, 0)
        rest = gl.where(beyond, upper, lower)
    else:
        rest = mask + place
    for step in gl.static_range(5):
        if (16 >> step) < TOKENS:
            below = bits_set(rest & ((1 << (16 >> step)) - 1))
            beyond = rank >= below
            rank = gl.where(beyond, rank - below, rank)
            place = gl.where(beyond, place + (16 >> step), place)
            rest = gl.where(beyond, rest >> (16 >> step), rest)
    return place


@gluon.jit
def _only(flag, values):
    """The value of the only flag that is set, zero without one. Lanes add up 32 bits in one step, but not 64."""
    if values.dtype == gl.int64:
        lower, upper = _halves(values)
        upper = gl.sum(gl.where(flag, upper, 0), 0).to(gl.int64) << 32
        return upper | (gl.sum(gl.where(flag, lower, 0), 0).to(gl.int64) & 0xFFFFFFFF)
    else:
        return gl.sum(gl.where(flag, values, 0), 0)


@gluon.jit
def load_logits(
    logits, tokens, logits_stride, AGAIN: gl.constexpr, SHAPE: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """[tokens, experts] in the type that they have. Where there is none, there is another one: loads without a mask
    are all asked for at once. What is loaded again, from the L1, the compiler does not take for the same."""
    GRID: gl.constexpr = grid_layout(SHAPE.padded_experts, WARPS)
    token = gl.minimum(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, GRID)), tokens - 1)[:, None]
    expert = gl.arange(0, SHAPE.padded_experts, layout=gl.SliceLayout(0, GRID))[None, :]
    if SHAPE.num_experts < SHAPE.padded_experts:
        expert = gl.minimum(expert, SHAPE.num_experts - 1)
    sources = logits + token * logits_stride + expert
    return gl.load(sources, cache_modifier=".ca") if AGAIN else gl.load(sources)


@gluon.jit
def _among_highest(key, expert, TOP_K: gl.constexpr):
    """Which experts have one of the highest keys, of equal ones those in front. Keys are above `_NO_KEY`."""
    for _ in gl.static_range(TOP_K):
        highest = gl.max(key, 1)
        first = gl.min(gl.where(key == highest[:, None], expert, key.shape[1]), 1)
        key = gl.where(expert == first[:, None], _NO_KEY, key)
    return key == _NO_KEY


@gluon.jit
def _among_highest_of_16_bit(key, expert, TOP_K: gl.constexpr):
    """The same for keys of numbers in 16 bit, which leave the last 13 bits free: with the expert in them, there are
    no equal ones, and it takes one reduction to find the highest instead of two."""
    key = gl.where(key == _NO_KEY, key, (key & ~0x1FFF) | (0x1FFF - expert))
    for _ in gl.static_range(TOP_K):
        key = gl.where(key == gl.max(key, 1)[:, None], _NO_KEY, key)
    return key == _NO_KEY


@gluon.jit
def choose(loaded, correction, tokens, SHAPE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Whether a token visits an expert, [tokens, experts], from their logits."""
    EXPERTS: gl.constexpr = SHAPE.padded_experts
    GRID: gl.constexpr = grid_layout(EXPERTS, WARPS)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, GRID))[:, None]
    expert = gl.arange(0, EXPERTS, layout=gl.SliceLayout(0, GRID))[None, :]
    exists = expert < SHAPE.num_experts
    ranked = _score(loaded.to(gl.float32), SHAPE)
    if correction is not None:
        ranked += gl.load(correction + expert, mask=exists, other=0.0)
    key = gl.where(exists, _rank_key(ranked), _NO_KEY)
    if loaded.dtype.primitive_bitwidth == 16 and SHAPE.scoring == "softmax" and correction is None:
        highest = _among_highest_of_16_bit(key, expert, SHAPE.top_k)
    else:
        highest = _among_highest(key, expert, SHAPE.top_k)
    return highest & exists & (token < tokens)


@gluon.jit
def masks_of_experts(chosen, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Of every expert the tokens that visit it, as bits."""
    EXPERTS: gl.constexpr = chosen.shape[1]
    GRID: gl.constexpr = grid_layout(EXPERTS, WARPS)
    MASK: gl.constexpr = gl.int64 if TOKENS > 32 else gl.int32
    if TOKENS == 8:
        masks = _masks_of_eight(chosen, WARPS)
    else:
        token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, GRID))
        bit = gl.full([TOKENS, EXPERTS], 1, MASK, layout=GRID) << token.to(MASK)[:, None]
        masks = gl.sum(gl.where(chosen, bit, 0), 0)
    return gl.convert_layout(masks, experts_layout(EXPERTS, WARPS))


@gluon.jit
def _masks_of_eight(chosen, WARPS: gl.constexpr):
    """The same for eight tokens, with less to exchange between warps: masks are bytes, of up to four experts in a
    word, and every thread adds up those that it needs."""
    EXPERTS: gl.constexpr = chosen.shape[1]
    BYTES: gl.constexpr = 4 if EXPERTS > 64 else EXPERTS // 32
    WORDS: gl.constexpr = EXPERTS // BYTES
    GRID: gl.constexpr = grid_layout(EXPERTS, WARPS)
    OF_THREAD: gl.constexpr = gl.BlockedLayout([8, WORDS // 32], [1, 32], [1, WARPS], [1, 0])
    UNPACKED: gl.constexpr = gl.BlockedLayout([WORDS // 32, BYTES], [32, 1], [WARPS, 1], [1, 0])
    token = gl.arange(0, 8, layout=gl.SliceLayout(1, GRID))[:, None]
    expert = gl.arange(0, EXPERTS, layout=gl.SliceLayout(0, GRID))[None, :]
    bit = gl.full([8, EXPERTS], 1, gl.int32, layout=GRID) << (token + expert % BYTES * 8)
    words = gl.sum(gl.reshape(gl.where(chosen, bit, 0), [8, WORDS, BYTES]), 2)
    word = gl.convert_layout(gl.sum(gl.convert_layout(words, OF_THREAD), 0), gl.SliceLayout(1, UNPACKED))
    byte = gl.arange(0, BYTES, layout=gl.SliceLayout(0, UNPACKED))
    return gl.reshape(word[:, None] >> byte[None, :] * 8 & 255, [EXPERTS])


@gluon.jit
def divisors(loaded, chosen, tokens, SHAPE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Of every token its highest logit, and what its scores are divided by."""
    GRID: gl.constexpr = grid_layout(SHAPE.padded_experts, WARPS)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, GRID))
    exists = gl.arange(0, SHAPE.padded_experts, layout=gl.SliceLayout(0, GRID))[None, :] < SHAPE.num_experts
    logit = loaded.to(gl.float32)
    top = gl.max(gl.where(exists, logit, float("-inf")), 1)
    if SHAPE.scoring == "sigmoid":
        divisor = gl.full([TOKENS], 1.0, gl.float32, layout=gl.SliceLayout(1, GRID))
        if SHAPE.renormalize:
            divisor = gl.sum(gl.where(chosen, _score(logit, SHAPE), 0.0), 1)
    else:
        counted = chosen if SHAPE.renormalize else exists & (token < tokens)[:, None]
        divisor = gl.sum(gl.where(counted, gl.exp2((logit - top[:, None]) * _LOG2_E), 0.0), 1)
    return top, gl.where(token < tokens, divisor, 1.0)


@gluon.jit
def _set_in_lower_lanes(flag):
    """For how many of the lanes before its own a flag in the same register is set."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred is_set;
        .reg .b32 lanes, lower;
        setp.ne.s32 is_set, $1, 0;
        vote.sync.ballot.b32 lanes, is_set, 0xffffffff;
        mov.u32 lower, %lanemask_lt;
        and.b32 lanes, lanes, lower;
        popc.b32 $0, lanes;
        }""",
        "=r,r",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _set_before(flags):
    """How many flags of [experts] are set before each: votes of all lanes take less than a chain of shuffles."""
    of_lanes = gl.reshape(flags, [32, flags.shape[0] // 32])
    before = gl.sum(_set_in_lower_lanes(of_lanes), 1)[:, None] + gl.associative_scan(of_lanes, 1, _plus) - of_lanes
    return gl.convert_layout(gl.reshape(before, flags.shape), flags.type.layout, assert_trivial=True)


@gluon.jit
def tiles_of_experts(masks, TOP_K: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """Of every expert how many tiles of columns its tokens fill, and how many tiles come before; how many there are
    of all."""
    if TOKENS <= COLUMNS:
        tiles = (masks != 0).to(gl.int32)
        before = _set_before(tiles)
    else:
        tiles = (bits_set(masks) + (COLUMNS - 1)) // COLUMNS
        before = gl.associative_scan(tiles, 0, _plus) - tiles
    # One token visits as many experts as any, so that where a program begins is known before the logits are.
    return tiles, before, TOP_K if TOKENS == 1 else gl.sum(tiles, 0)


@gluon.jit
def locate(
    place, masks, tiles, first_tile, SLICES: gl.constexpr, EXPERTS: gl.constexpr, TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Of a place in the list of work its expert, the expert's tokens as bits, how many tiles of columns they fill,
    and the place at which the expert's part of the list begins. Beyond the end there is expert 0."""
    number = gl.arange(0, EXPERTS, layout=masks.type.layout)
    tile = place // SLICES
    this = (first_tile <= tile) & (tile < first_tile + tiles)
    expert = _only(this, number)
    mask = gl.to_tensor(1) if TOKENS == 1 else _only(this, masks)
    if TOKENS <= COLUMNS:
        return expert, mask, 1, tile * SLICES
    else:
        return expert, mask, _only(this, tiles), _only(this, first_tile) * SLICES


@gluon.jit
def all_of(tokens, MASK: gl.constexpr):
    """That many tokens as bits; in two steps, as there can be as many as there are bits."""
    return ((gl.to_tensor(1).to(MASK) << (gl.to_tensor(tokens) - 1).to(MASK)) - 1) * 2 + 1


@gluon.jit
def columns_of(mask, part, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The token of every column of a tile, and whether there is one. Where all tokens of a launch go into one tile,
    the column of a token is the same for every expert."""
    column = gl.arange(0, COLUMNS, layout=LAYOUT)
    if TOKENS <= COLUMNS:
        real = (mask >> column & 1) != 0
        return gl.where(real, column, 0), real
    else:
        rank = part * COLUMNS + column
        real = rank < bits_set(mask)
        return gl.where(real, place_of_bit(mask, rank, TOKENS), 0), real


@gluon.jit
def _of_tokens(values, token, TOKENS: gl.constexpr):
    """The values that belong to tokens."""
    if TOKENS == 1:
        return gl.sum(values, 0)
    else:
        return gl.gather(values, token, 0)


@gluon.jit
def shares_of(
    logits, expert, token, real, logits_stride, top, divisor, SHAPE: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Weight of one expert for the tokens of columns."""
    logit = gl.load(logits + token * logits_stride + expert, mask=real, other=0.0).to(gl.float32)
    divided_by = gl.where(real, _of_tokens(divisor, token, TOKENS), 1.0)
    if SHAPE.scoring == "sigmoid":
        return _score(logit, SHAPE) / divided_by * SHAPE.factor
    else:
        return gl.exp2((logit - _of_tokens(top, token, TOKENS)) * _LOG2_E) / divided_by * SHAPE.factor
