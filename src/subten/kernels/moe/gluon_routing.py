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
    rest = mask + gl.zeros_like(rank).to(mask.dtype)
    for step in gl.static_range(6):
        if (32 >> step) < TOKENS:
            below = bits_set(rest & ((1 << (32 >> step)) - 1))
            beyond = rank >= below
            rank = gl.where(beyond, rank - below, rank)
            place = gl.where(beyond, place + (32 >> step), place)
            rest = gl.where(beyond, rest >> (32 >> step), rest)
    return place


@gluon.jit
def route(logits, correction, tokens, logits_stride, SHAPE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Of every expert the tokens that visit it, as bits; of every token its highest logit, and what its scores are
    divided by."""
    EXPERTS: gl.constexpr = SHAPE.padded_experts
    TOP_K: gl.constexpr = SHAPE.top_k
    GRID: gl.constexpr = grid_layout(EXPERTS, WARPS)
    MASK: gl.constexpr = gl.int64 if TOKENS > 32 else gl.int32
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, GRID))
    expert = gl.arange(0, EXPERTS, layout=gl.SliceLayout(0, GRID))
    exists = expert < SHAPE.num_experts
    inside = (token < tokens)[:, None] & exists[None, :]
    logit = gl.load(logits + token[:, None] * logits_stride + expert[None, :], mask=inside, other=0.0).to(gl.float32)
    score = _score(logit, SHAPE)
    ranked = score
    if correction is not None:
        ranked += gl.load(correction + expert, mask=exists, other=0.0)[None, :]
    key = gl.where(exists[None, :], _rank_key(ranked), _NO_KEY)
    for _ in gl.static_range(TOP_K):
        highest = gl.max(key, 1)
        first = gl.min(gl.where(key == highest[:, None], expert[None, :], EXPERTS), 1)
        key = gl.where(expert[None, :] == first[:, None], _NO_KEY, key)
    chosen = inside & (key == _NO_KEY)
    top = gl.max(gl.where(exists[None, :], logit, float("-inf")), 1)
    if SHAPE.scoring == "sigmoid":
        divisor = gl.full([TOKENS], 1.0, gl.float32, layout=gl.SliceLayout(1, GRID))
        if SHAPE.renormalize:
            divisor = gl.sum(gl.where(chosen, score, 0.0), 1)
    else:
        counted = chosen if SHAPE.renormalize else inside
        divisor = gl.sum(gl.where(counted, gl.exp2((logit - top[:, None]) * _LOG2_E), 0.0), 1)
    divisor = gl.where(token < tokens, divisor, 1.0)
    bit = gl.full([TOKENS, EXPERTS], 1, MASK, layout=GRID) << token.to(MASK)[:, None]
    masks = gl.sum(gl.where(chosen, bit, 0), 0)
    return gl.convert_layout(masks, experts_layout(EXPERTS, WARPS)), top, divisor


@gluon.jit
def tiles_of_experts(masks, COLUMNS: gl.constexpr):
    """Of every expert how many tiles of columns its tokens fill, and how many tiles come before."""
    tiles = (bits_set(masks) + (COLUMNS - 1)) // COLUMNS
    return tiles, gl.associative_scan(tiles, 0, _plus) - tiles


@gluon.jit
def locate(place, masks, tiles, first_tile, SLICES: gl.constexpr, EXPERTS: gl.constexpr):
    """Of a place in the list of work its expert, the expert's tokens as bits, how many tiles of columns they fill,
    and the place at which the expert's part of the list begins. Beyond the end there is expert 0."""
    number = gl.arange(0, EXPERTS, layout=masks.type.layout)
    tile = place // SLICES
    this = (first_tile <= tile) & (tile < first_tile + tiles)
    expert = gl.sum(gl.where(this, number, 0), 0)
    mask = gl.sum(gl.where(this, masks, 0), 0)
    begin = gl.sum(gl.where(this, first_tile, 0), 0) * SLICES
    return expert, mask, gl.sum(gl.where(this, tiles, 0), 0), begin


@gluon.jit
def columns_of(mask, part, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The token of every column of a tile, and whether there is one."""
    rank = part * COLUMNS + gl.arange(0, COLUMNS, layout=LAYOUT)
    real = rank < bits_set(mask)
    return gl.where(real, place_of_bit(mask, rank, TOKENS), 0), real


@gluon.jit
def shares_of(logits, expert, token, real, logits_stride, top, divisor, SHAPE: gl.constexpr):
    """Weight of one expert for the tokens of columns."""
    logit = gl.load(logits + token * logits_stride + expert, mask=real, other=0.0).to(gl.float32)
    divided_by = gl.where(real, gl.gather(divisor, token, 0), 1.0)
    if SHAPE.scoring == "sigmoid":
        return _score(logit, SHAPE) / divided_by * SHAPE.factor
    else:
        return gl.exp2((logit - gl.gather(top, token, 0)) * _LOG2_E) / divided_by * SHAPE.factor
