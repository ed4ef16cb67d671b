"""Tokens into page records on a GPU: one launch codes the keys and values of many tokens, in one layer or in all.

The result is that of `subten.formats.codec.write_tokens`: mean key removed, kept pair taken out, then nearest
rounding with a refit, or the two passes of subten/formats/shaping.py. A row lies in the registers of one warp. Each
step of a pass moves one coordinate to all lanes (one shuffle), rounds it, and hands its error on with one fused
multiply-add per element; a pass waits for that chain of about 50 cycles, coordinate after coordinate. Matrices are
read row by row, some rows ahead, and each row serves all tokens of a program. Where one token is coded, their bytes
are what takes the time: the metric and the feedback are float16, and a plain Hadamard transform reads no matrix.

Two things differ from the torch code; neither changes what is computed:

- The descent pass starts from metric @ (target - codes), and the refits need metric @ codes. Both are added up while
  the coordinates are rounded, so that no pass reads a matrix twice. A new grid in between changes scale and offset
  of the target, and both sums are linear in it.
- Elementwise arithmetic is float32 as torch has it, every operation rounded by itself; long sums are explicit fused
  multiply-adds. Codes then differ from torch only where a decision hangs by the order of a sum, and what a token
  becomes does not depend on how many were coded with it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.formats.affine import F16_MAX, F16_TINY, OFFSET_BITS, OFFSETS_PER_STEP
from subten.formats.packing import WORD_BITS
from subten.formats.quantizers import E4M3_MAX, GAUSSIAN_STEP
from subten.formats.spec import PAGE_SIZE
from subten.kernels.attention.device_cache import CodingTables, PagedLayers
from subten.kernels.attention.inputs import AttentionInputs

_UNROLL = tl.constexpr(4)
"""Coordinates per turn of a loop. The registers of a row are four neighbours wide: with four coordinates per turn the
compiler knows which register holds a coordinate, and one shuffle moves it."""

_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds a float32 of less than 2^22 to the nearest integer, halves to even."""
_F16_MAX, _F16_TINY, _E4M3_MAX = tl.constexpr(F16_MAX), tl.constexpr(F16_TINY), tl.constexpr(E4M3_MAX)
_LARGEST_ELEMENT = tl.constexpr(F16_MAX / 4)
_LARGEST_GAIN = tl.constexpr(2.0)
_STEP_2_BITS, _STEP_4_BITS = tl.constexpr(GAUSSIAN_STEP[2]), tl.constexpr(GAUSSIAN_STEP[4])
_PAGE_SIZE, _WORD_BITS = tl.constexpr(PAGE_SIZE), tl.constexpr(WORD_BITS)
_OFFSET_BITS, _PER_STEP = tl.constexpr(OFFSET_BITS), tl.constexpr(OFFSETS_PER_STEP)
_EXCESS = tl.constexpr(1 << (OFFSET_BITS - 1))
_LARGEST_OFFSET = tl.constexpr((1 << (OFFSET_BITS - 1)) / OFFSETS_PER_STEP - 1 / OFFSETS_PER_STEP)
_OFFSET_MASK = tl.constexpr((1 << OFFSET_BITS) - 1)
_DROPPED = tl.constexpr(OFFSET_BITS - 1)
_HALF_DROPPED, _LARGEST_SCALE = tl.constexpr(1 << (OFFSET_BITS - 2)), tl.constexpr(0x7FFF >> (OFFSET_BITS - 1))
_PACKED_MAX = tl.constexpr(float.fromhex("0x1.f8p15"))
_ALL = tl.constexpr(tl.PropagateNan.ALL)


# --- pieces ----------------------------------------------------------------------------------------------------


@triton.jit
def coordinate(rows, index):
    """One coordinate of every row: [T, n] to [T, 1]."""
    return tl.gather(rows, tl.full([rows.shape[0], 1], index, tl.int32), 1)


@triton.jit
def _over(x, y):
    return tl.math.div_rn(x, y)


@triton.jit
def _level(x, LEVELS: tl.constexpr):
    """The nearest of 0 .. LEVELS; NaN stays NaN."""
    return (tl.clamp(x, 0.0, LEVELS, _ALL) + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def to_f16(x):
    """Round to float16; beyond its range saturate."""
    return tl.clamp(x, -_F16_MAX, _F16_MAX, _ALL).to(tl.float16)


@triton.jit
def _bits(x):
    """The bits of a 16-bit float, in an int16."""
    return x.to(tl.int16, bitcast=True)


@triton.jit
def _of_pair(pairs, HALF: tl.constexpr):
    """Float32 of the first or the second of two float16 in an int32."""
    return (pairs >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _hadamard(rows, order, HEAD_DIM: tl.constexpr, ORDERED: tl.constexpr):
    """Rows [T, n] after the transform of subten/formats/hadamard.py; in the order of rounding, where there is one."""
    BLOCK: tl.constexpr = HEAD_DIM & -HEAD_DIM
    column = tl.broadcast_to(tl.arange(0, rows.shape[1])[None, :], rows.shape)
    for bit in tl.static_range(8):
        if 1 << bit < BLOCK:
            others = tl.gather(rows, column ^ (1 << bit), 1)
            rows = tl.where((column >> bit) & 1 == 0, rows + others, others - rows)
    rows *= BLOCK**-0.5
    if ORDERED:
        channel = tl.broadcast_to(tl.load(order + tl.arange(0, rows.shape[1]))[None, :], rows.shape)
        rows = tl.where(column < HEAD_DIM, tl.gather(rows, channel, 1), 0.0)
    return rows


@triton.jit
def _times(x, matrix, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Rows [T, n] times a matrix, in float32; the matrix has SIZE rows of n elements."""
    n: tl.constexpr = x.shape[1]
    column = tl.arange(0, n)
    total = tl.zeros_like(x)
    for i in tl.range(0, SIZE, loop_unroll_factor=_UNROLL, num_stages=STAGES):
        row = tl.load(matrix + i * n + column)[None, :]
        total = tl.fma(coordinate(x, i), row, total)
    return total


# --- grids (subten/formats/affine.py) --------------------------------------------------------------------------


@triton.jit
def _store_affine(scale, offset, LEVELS: tl.constexpr, PACKED: tl.constexpr):
    """Scale and offset as stored: two int16; a packed grid is the first."""
    if PACKED:
        centre = offset + (LEVELS / 2) * scale
        scale = tl.maximum(scale, _over(tl.abs(centre), _LARGEST_OFFSET), propagate_nan=_ALL)
        bits = _bits(to_f16(tl.clamp(scale, 0.0, _PACKED_MAX, _ALL))).to(tl.int32) & 0x7FFF
        bits = tl.minimum((bits + _HALF_DROPPED) >> _DROPPED, _LARGEST_SCALE)
        rounded = (bits << _DROPPED).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        eighths = tl.clamp(_over(centre, rounded) * _PER_STEP, -_EXCESS, _EXCESS - 1, _ALL)
        eighths = (eighths + _TO_INTEGER) - _TO_INTEGER
        eighths = tl.where(eighths == eighths, eighths, 0.0).to(tl.int32)
        first = ((bits << _OFFSET_BITS) | (eighths + _EXCESS)).to(tl.int16)
        second = first
    else:
        first, second = _bits(to_f16(scale)), _bits(to_f16(offset))
    return first, second


@triton.jit
def _load_affine(first, second, LEVELS: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        word = first.to(tl.int32) & 0xFFFF
        scale = ((word >> _OFFSET_BITS) << _DROPPED).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        eighths = ((word & _OFFSET_MASK) - _EXCESS).to(tl.float32)
        offset = (eighths / _PER_STEP - LEVELS / 2) * scale
    else:
        scale = first.to(tl.float16, bitcast=True).to(tl.float32)
        offset = second.to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def _unbiasing(energy, explained):
    explained = tl.maximum(explained, _F16_TINY, propagate_nan=_ALL)
    return tl.clamp(_over(energy, explained), 1.0, _LARGEST_GAIN, _ALL)


@triton.jit
def _positive(scale):
    return tl.maximum(scale, 1e-12, propagate_nan=_ALL)


# --- rows to codes ---------------------------------------------------------------------------------------------


@triton.jit
def _gaussian_step(centred, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    STEP: tl.constexpr = _STEP_2_BITS if BITS == 2 else _STEP_4_BITS
    return tl.sqrt_rn(_over(tl.sum(centred * centred, 1, keep_dims=True), HEAD_DIM)) * STEP


@triton.jit
def _fit(rows, codes, weighted, weights, total, scale):
    """`fit_grid` of shaping.py, with `weighted` = codes @ metric; also rows . metric . ones and rows . weighted."""
    linear = tl.sum(weighted, 1, keep_dims=True)
    square = tl.sum(weighted * codes, 1, keep_dims=True)
    row_one = tl.sum(rows * weights, 1, keep_dims=True)
    row_code = tl.sum(rows * weighted, 1, keep_dims=True)
    determinant = total * square - linear * linear
    slope = _over(total * row_code - linear * row_one, _positive(determinant))
    found = (determinant > 1e-3 * total * square) & (slope > 0)
    scale = tl.where(found, slope, scale)
    return scale, _over(row_one - scale * linear, total), row_one, row_code


@triton.jit
def _shaped(
    rows,
    feedback,
    metric,
    vectors,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes (float32) and grid of rows [T, n] in the order of rounding; `shape` of shaping.py."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    n: tl.constexpr = rows.shape[1]
    column = tl.arange(0, n)
    weights = tl.load(vectors + column)[None, :]
    total = tl.load(vectors + 2 * n)
    mean = _over(tl.sum(rows, 1, keep_dims=True), HEAD_DIM)
    scale = _gaussian_step(tl.where(column[None, :] < HEAD_DIM, rows - mean, 0.0), HEAD_DIM, BITS)
    offset = mean - scale * (LEVELS / 2)

    unit = _positive(scale)
    target = _over(rows - offset, unit)
    codes = target  # first what a coordinate should be, once it was rounded its code
    pull = tl.zeros_like(rows)  # metric @ (target - codes)
    weighted = tl.zeros_like(rows)  # metric @ codes
    for even in tl.range(0, HEAD_DIM, 2, loop_unroll_factor=_UNROLL // 2, num_stages=STAGES):
        # What comes before a coordinate gets no share of its error: zeros that need not be read.
        shares = tl.load(feedback + even // 2 * n + column, mask=column // 4 >= even // 4, other=0)[None, :]
        costs = tl.load(metric + even // 2 * n + column)[None, :]
        for half in tl.static_range(2):
            i = even + half
            share, cost = _of_pair(shares, half), _of_pair(costs, half)
            wanted = coordinate(codes, i)
            code = _level(wanted, LEVELS)
            codes = tl.where(column[None, :] == i, code, tl.fma(wanted - code, share, codes))
            pull = tl.fma(coordinate(target, i) - code, cost, pull)
            weighted = tl.fma(code, cost, weighted)
    energy = tl.sum(rows * (unit * (pull + weighted) + offset * weights), 1, keep_dims=True)

    scale, start, row_one, row_code = _fit(rows, codes, weighted, weights, total, scale)
    first, second = _store_affine(scale, start, LEVELS, PACKED)
    scale, start = _load_affine(first, second, LEVELS, PACKED)
    # In units of the new grid the target is `stretch * target + shift`.
    stretch = _over(unit, _positive(scale))
    shift = _over(offset - start, _positive(scale))
    pull = stretch * pull + ((stretch - 1) * weighted + shift * weights)

    inverse_diagonal = tl.broadcast_to(tl.load(vectors + n + column)[None, :], rows.shape)
    weighted += pull
    for even in tl.range(0, HEAD_DIM, 2, loop_unroll_factor=_UNROLL // 2, num_stages=STAGES):
        costs = tl.load(metric + even // 2 * n + column)[None, :]
        for half in tl.static_range(2):
            i = even + half
            before = coordinate(codes, i)
            code = _level(tl.fma(coordinate(pull, i), coordinate(inverse_diagonal, i), before), LEVELS)
            pull = tl.fma(before - code, _of_pair(costs, half), pull)
            codes = tl.where(column[None, :] == i, code, codes)

    scale, start, row_one, row_code = _fit(rows, codes, weighted - pull, weights, total, scale)
    gain = _unbiasing(energy, scale * row_code + start * row_one)
    first, second = _store_affine(scale * gain, start * gain, LEVELS, PACKED)
    return codes, first, second


@triton.jit
def _nearest(rows, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Codes (float32) and grid of rows [T, n]; `_least_squares` of quantizers.py."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    inside = tl.arange(0, rows.shape[1])[None, :] < HEAD_DIM
    mean = _over(tl.sum(rows, 1, keep_dims=True), HEAD_DIM)
    centred = tl.where(inside, rows - mean, 0.0)
    step = _gaussian_step(centred, HEAD_DIM, BITS)
    codes = tl.where(inside, _level(_over(centred, _positive(step)) + LEVELS / 2, LEVELS), 0.0)
    code_mean = _over(tl.sum(codes, 1, keep_dims=True), HEAD_DIM)
    deviation = tl.where(inside, codes - code_mean, 0.0)
    variance = tl.sum(deviation * deviation, 1, keep_dims=True)
    scale = _over(tl.sum(deviation * centred, 1, keep_dims=True), _positive(variance))
    first, second = _store_affine(scale, mean - scale * code_mean, LEVELS, PACKED)
    scale, offset = _load_affine(first, second, LEVELS, PACKED)
    if PACKED:
        codes = tl.where(inside, _level(_over(rows - offset, _positive(scale)), LEVELS), 0.0)
    read = codes * scale + offset
    gain = _unbiasing(tl.sum(rows * rows, 1, keep_dims=True), tl.sum(read * rows, 1, keep_dims=True))
    first, second = _store_affine(scale * gain, offset * gain, LEVELS, PACKED)
    return codes, first, second


@triton.jit
def _e4m3(rows):
    """Bits (int32) of rows in e4m3, and the scale. Written out, as not every GPU has the conversion."""
    broken = tl.max((rows != rows).to(tl.int32), 1, keep_dims=True) > 0
    largest = tl.where(broken, float("nan"), tl.max(tl.abs(rows), 1, keep_dims=True))
    scale = to_f16(tl.maximum(_over(largest, _E4M3_MAX), _F16_TINY, propagate_nan=_ALL))
    x = tl.clamp(_over(rows, scale.to(tl.float32)), -_E4M3_MAX, _E4M3_MAX, _ALL)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three of 23 mantissa bits, halves to even, and an exponent that starts at -7 instead of -127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 multiples of 2^-9, which is what the last mantissa bit of 2^14 is worth.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < (127 - 6) << 23, subnormal, normal)
    codes = tl.where(x == x, codes, 0x7F) | ((bits >> 24) & 0x80)
    return codes, _bits(scale)


# --- the kernel ------------------------------------------------------------------------------------------------


@triton.jit
def _store_words(codes, plane, word_step, order, live, CODE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Codes (int32) [T, n] to words as subten/formats/packing.py has them, `word_step` apart from `plane` on."""
    WORDS: tl.constexpr = HEAD_DIM * CODE.bits // _WORD_BITS
    word = tl.arange(0, codes.shape[1] * CODE.bits // _WORD_BITS)[None, :]
    inside = word < WORDS
    words = tl.zeros([codes.shape[0], word.shape[1]], tl.int32)
    CODES: tl.constexpr = _WORD_BITS // CODE.bits
    for p in tl.static_range(CODES):
        channel = tl.where(inside, p * WORDS + word, 0)
        if CODE.shaped:
            channel = tl.load(order + codes.shape[1] + channel)
        words |= tl.gather(codes, tl.broadcast_to(channel, words.shape), 1) << (p * CODE.bits)
    tl.store(plane + word * word_step, words.to(tl.int16), mask=live & inside)


@triton.jit
def _code(rows, feedback, metric, vectors, CODE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    """Codes (int32) and the two parts of the grid (int16) of rows [T, n] in coded space."""
    if CODE.kind == "e4m3":
        codes, first = _e4m3(rows)
        second = first
    else:
        rows = tl.clamp(rows, -_LARGEST_ELEMENT, _LARGEST_ELEMENT, _ALL)
        if CODE.shaped:
            codes, first, second = _shaped(
                rows, feedback, metric, vectors, HEAD_DIM, CODE.bits, CODE.parts == 1, STAGES
            )
        else:
            codes, first, second = _nearest(rows, HEAD_DIM, CODE.bits, CODE.parts == 1)
        # NaN has no code: it becomes 0 here and stays visible in the scale.
        codes = tl.where(codes == codes, codes, 0.0).to(tl.int32)
    return codes, first, second


@triton.jit
def _mean_key(mean, cos, sin, position, live, HEAD_DIM: tl.constexpr, n: tl.constexpr):
    """The mean key as it lies at `position` [T, 1]: [T, n]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, n)[None, :]
    inside = column < HEAD_DIM
    turn = position * HALF + column % HALF
    same = tl.load(mean + column, mask=inside, other=0.0)
    other = tl.load(mean + (column + HALF) % HEAD_DIM, mask=inside, other=0.0)
    same = same * tl.load(cos + turn, mask=live & inside, other=0.0)
    other = other * tl.load(sin + turn, mask=live & inside, other=0.0)
    return tl.where(column < HALF, same - other, same + other)


@triton.jit
def encode_kernel(
    pages,
    tokens,
    block_table,
    window_slot,
    sequence,
    position,
    transform,
    feedback,
    metric,
    vectors,
    order,
    kept_channels,
    mean,
    cos,
    sin,
    count,
    ahead,
    pages_layer,
    pages_page,
    pages_head,
    tokens_layer,
    tokens_slot,
    tokens_side,
    tokens_head,
    tokens_row,
    table_row,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST_SIDE: tl.constexpr,
    SIDES: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HADAMARD_KEYS: tl.constexpr,
    HADAMARD_VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Code TOKENS tokens of one layer and head, keys or values, and store them in their pages.

    Grid: (blocks of tokens, num_kv_heads, layers * SIDES). The arguments are those of `encode_arguments`.
    """
    head, layer, side = tl.program_id(1), tl.program_id(2) // SIDES, FIRST_SIDE + tl.program_id(2) % SIDES
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    live = row < count
    owner = row
    if sequence is not None:
        owner = tl.load(sequence + row, mask=live, other=0)
    at = tl.load(position + row, mask=live, other=0) + ahead
    slot = tl.load(window_slot + owner, mask=live, other=-1).to(tl.int64)
    index = at - SINKS
    live = live & (slot >= 0) & (index >= 0)
    page = tl.load(block_table + owner.to(tl.int64) * table_row + index // _PAGE_SIZE, mask=live, other=0)
    record = pages + layer.to(tl.int64) * pages_layer + page.to(tl.int64) * pages_page + head * pages_head
    token = index % _PAGE_SIZE

    source = tokens + layer.to(tl.int64) * tokens_layer + side * tokens_side + head * tokens_head
    if RING > 0:
        source += slot * tokens_slot
        row = SINKS + index % RING
    raw = tl.load(source + row.to(tl.int64) * tokens_row + column, mask=live & (column < HEAD_DIM), other=0.0)

    if CODE.kind == "wide":
        codes_at = tl.where(side == 0, PLACES.key_codes, PLACES.value_codes)
        tl.store(record + codes_at + token * HEAD_DIM + column, _bits(raw), mask=live & (column < HEAD_DIM))
    else:
        rows = raw.to(tl.float32)
        if side == 0:
            of_head = layer * tl.num_programs(1) + head
            if mean is not None:
                rows -= _mean_key(mean + of_head * HEAD_DIM, cos, sin, at, live, HEAD_DIM, PADDED)
            NUM_KEPT: tl.constexpr = PLACES.num_kept
            for kept in tl.static_range(NUM_KEPT):
                channel = tl.load(kept_channels + of_head * NUM_KEPT + kept)
                place = record + PLACES.kept_pair + token * NUM_KEPT + kept
                tl.store(place, _bits(to_f16(coordinate(rows, channel))), mask=live)
                rows = tl.where(column == channel, 0.0, rows)

        of_side = (layer * 2 + side) * tl.num_programs(1) + head
        if CODE.shaped:
            feedback += of_side.to(tl.int64) * (HEAD_DIM // 2 * PADDED)
            metric += of_side.to(tl.int64) * (HEAD_DIM // 2 * PADDED)
            vectors += of_side * (3 * PADDED)
            order += of_side * (2 * PADDED)
        if CODE.transformed:
            if HADAMARD_KEYS and HADAMARD_VALUES:
                rows = _hadamard(rows, order, HEAD_DIM, CODE.shaped)
            else:
                if HADAMARD_VALUES and side == 1:
                    rows = _hadamard(rows, order, HEAD_DIM, CODE.shaped)
                else:
                    matrix = transform + of_side.to(tl.int64) * (HEAD_DIM * PADDED)
                    rows = _times(rows, matrix, HEAD_DIM, STAGES)
        codes, first, second = _code(rows, feedback, metric, vectors, CODE, HEAD_DIM, STAGES)

        grids_at = tl.where(side == 0, PLACES.key_grids, PLACES.value_grids)
        grid = record + grids_at + token * CODE.parts
        tl.store(grid, first, mask=live)
        if CODE.parts == 2:
            tl.store(grid + 1, second, mask=live)
        WORDS: tl.constexpr = HEAD_DIM * CODE.bits // _WORD_BITS
        place = (token % 8) * 8 + token // 8
        word_step = tl.where(side == 0, 1, _PAGE_SIZE)
        place = tl.where(side == 0, PLACES.key_codes + place * WORDS, PLACES.value_codes + place)
        _store_words(codes, record + place, word_step, order, live, CODE, HEAD_DIM)


# --- from the host ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a program works.

    Attributes:
        tokens: that it codes.
        warps: of it.
        stages: turns of a loop, the one at work and those whose matrix rows are on their way. Few programs must have
            much on its way to get what the memory can give.
    """

    tokens: int
    warps: int
    stages: int = 3

    @classmethod
    def of(cls, count: int, padded: int) -> Tile:
        """For so many tokens of a head, whose rows are `padded` wide.

        A program reads 80 to 144 KiB of matrices at head_dim 128, whatever its tokens: in the batch of a large decode
        step, or a prefill, the more tokens the better. A warp has registers for 512 elements of each vector. Below
        128 the lanes would hold less than four neighbours each, and sums would come in another order.
        """
        few, many = max(1, 128 // padded), 512 // padded
        if count <= few:
            return cls(few, 1, 6)
        return cls(many, 1, 4) if count <= 2 * many else cls(4 * many, 4, 4)


def encode_leaving(layers: PagedLayers, inputs: AttentionInputs, tile: Tile | None = None) -> None:
    """Of a decode step, code the token of every sequence that leaves its window in the next step.

    Token and slot are found on the device, from `inputs` alone. With two recent tokens or more the step's own
    token has no part in it: the launch may run at any time within the step, beside the layers. With one, it is the
    step's own token: launch after its append. Without recent tokens use `encode_tokens`.

    Args:
        layers: the layers, codes stored in place.
        inputs: the batch, one token per sequence. Sequences with a negative `window_slot` are left out;
            `block_table` has room for the tokens of the next step.
        tile: how to cut the work, where not as by default.
    """
    fmt = layers.layout.format
    assert fmt.recent > 0
    _launch(layers, encode_arguments(layers, layers.windows, None, inputs.context_len, inputs, 1 - fmt.recent), tile)


def encode_tokens(
    layers: PagedLayers,
    tokens: Tensor,
    position: Tensor,
    inputs: AttentionInputs,
    sequence: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Code given tokens of one layer.

    Args:
        layers: the layer, codes stored in place.
        tokens: [2 (K, V), tokens, num_kv_heads, head_dim] of the cache's wide dtype, last axis contiguous.
        position: int32 or int64 [tokens]; tokens before the end of the sinks are left out.
        inputs: the batch; sequences with a negative `window_slot` are left out.
        sequence: int32 or int64 [tokens], which of the batch each token is of; None where there is one of each.
        tile: how to cut the work, where not as by default.
    """
    _launch(
        layers, encode_arguments(layers, tokens.transpose(1, 2)[None, None], sequence, position, inputs, None), tile
    )


def encode_arguments(
    layers: PagedLayers,
    tokens: Tensor,
    sequence: Tensor | None,
    position: Tensor,
    inputs: AttentionInputs,
    ahead: int | None,
) -> dict[str, Any]:
    """Arguments of `encode_kernel` but for `side_arguments` and those of a tile.

    Args:
        layers: the layers, codes stored in place.
        tokens: [layers, slots, 2, num_kv_heads, rows, head_dim], the windows, or one slot of tokens.
        sequence: of each token, or None where token t is of sequence t.
        position: of each token.
        inputs: the batch.
        ahead: added to `position` of tokens in the windows; None where `tokens` is no window.
    """
    layout, tables = layers.layout, layers.tables
    pages = layers.pages.view(torch.int16)
    return {
        "pages": pages,
        "tokens": tokens,
        "block_table": inputs.block_table,
        "window_slot": inputs.window_slot,
        "sequence": sequence,
        "position": position,
        "transform": tables.transform,
        "feedback": tables.feedback,
        "metric": tables.metric,
        "vectors": tables.vectors,
        "order": tables.order,
        "kept_channels": tables.kept_channels,
        "mean": tables.mean,
        "cos": tables.rope and tables.rope.cos,
        "sin": tables.rope and tables.rope.sin,
        "count": position.shape[0],
        "ahead": ahead or 0,
        **{f"pages_{axis}": pages.stride(i) for i, axis in enumerate(("layer", "page", "head"))},
        **{f"tokens_{axis}": tokens.stride(i) for i, axis in enumerate(("layer", "slot", "side", "head", "row"))},
        "table_row": inputs.block_table.stride(0),
        "PLACES": tables.places,
        "SINKS": layout.format.sinks,
        "RING": 0 if ahead is None else layout.format.ring_size,
        "HEAD_DIM": layout.head_dim,
        "PADDED": triton.next_power_of_2(layout.head_dim),
        "HADAMARD_KEYS": tables.hadamard[0],
        "HADAMARD_VALUES": tables.hadamard[1],
    }


def side_arguments(tables: CodingTables) -> list[dict[str, Any]]:
    """The launches that keys and values take, as further arguments: one where they are coded alike, else two."""
    if tables.key == tables.value:
        return [{"CODE": tables.key, "FIRST_SIDE": 0, "SIDES": 2}]
    return [{"CODE": code, "FIRST_SIDE": side, "SIDES": 1} for side, code in enumerate((tables.key, tables.value))]


def _launch(layers: PagedLayers, arguments: dict[str, Any], tile: Tile | None) -> None:
    num_layers, _, num_kv_heads, _ = layers.pages.shape
    tile = tile or Tile.of(arguments["count"], arguments["PADDED"])
    blocks = triton.cdiv(arguments["count"], tile.tokens)
    for side in side_arguments(layers.tables):
        encode_kernel[(blocks, num_kv_heads, num_layers * side["SIDES"])](
            **arguments,
            **side,
            TOKENS=tile.tokens,
            STAGES=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
