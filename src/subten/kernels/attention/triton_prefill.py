"""`attend_prefill` on a GPU: chunks of queries over the quantised pages and the 16-bit tokens that they see.

Two launches. `prepare_kernel` brings every query to float16, as it is, in the coded space of the keys, and multiplied
with the mean key; `prefill_kernel` is a flash attention (Dao, arXiv:2307.08691) over tiles of 64 tokens. Its rows are
the queries of one KV head, the heads of a group side by side, so that a tile is read and dequantised once for all.

Dequantising. With the few rows of a decode step it is cheaper to apply scale and offset to scores than to keys. Here
a tile has about as many rows as channels, and the tile's own arithmetic is cheaper: it is in pairs of float16, the
scores' is in float32. A shift and an AND-OR isolate the codes of two neighbours as 1024 + code, one subtraction and
one fused multiply-add make them a key. The planes of words are joined innermost, where a thread keeps all it has: so
the channels of a tile come in the order of `_channel`, and the coded queries are written in it.

The mean key. With u, w the halves of a query and a, b those of the mean key before RoPE, the score of the mean key as
it lies at position t is cos(t) . (u a + w b) + sin(t) . (w a - u b): the brackets are made once per query, and the
rows of the model's RoPE table are what they are multiplied with.

The coded part is summed in the coded space of the values. It is brought back before the 16-bit tokens are added: by
way of memory, since a product needs the sums as its left operand, and at head_dim 256 the registers can't hold it
along with its result. The program's own coded queries are not needed any more by then, and lend it theirs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.formats.affine import OFFSET_BITS, OFFSETS_PER_STEP
from subten.formats.affine import to_f16 as saturated_f16
from subten.formats.packing import WORD_BITS
from subten.formats.spec import PAGE_SIZE
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.inputs import AttentionInputs
from subten.kernels.attention.triton_append import WideBatch
from subten.kernels.attention.triton_encode import to_f16

_TILE = tl.constexpr(PAGE_SIZE)
"""Tokens of a tile: a page, or as many of the 16-bit tokens."""
_WORD_BITS = tl.constexpr(WORD_BITS)
_KEPT = tl.constexpr(16)
"""Columns of the kept channels, most of them zero: a tensor core sums over 16 at least."""
_LARGEST_QUERY = tl.constexpr(2.0**9)
"""Below float16's largest, and 2^23 times its smallest normal number."""
_SLICE = tl.constexpr(32)
"""Channels that are multiplied with a matrix at a time."""
_E4M3_TO_F16 = tl.constexpr(2.0**8)
"""An e4m3 number's bits, moved to where float16 has exponent and mantissa, are this much too small a number."""
_OFFSET_MASK, _PER_STEP = tl.constexpr((1 << OFFSET_BITS) - 1), tl.constexpr(OFFSETS_PER_STEP)
_SCALE_BITS = tl.constexpr(0x7FFF >> (OFFSET_BITS - 1) << (OFFSET_BITS - 1))
_MIDDLE = tl.constexpr((1024 + (1 << (OFFSET_BITS - 1))) / OFFSETS_PER_STEP + 1.5)
"""What the middle of the grid of 2 bits is read as, in units of its scale."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_NO_LIMIT = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Blocks:
    """Rows of one program of `prefill_kernel`, its warps, and the tiles it has on their way."""

    rows: int
    warps: int
    stages: int

    @classmethod
    def of(cls, head_dim: int) -> Blocks:
        """However few rows there are: 64 of them for eight warps, which then share the tokens of a tile as well, gave
        wrong sums on an H200 (Triton 3.6).

        Two warpgroups share a tile, which halves the work of dequantising for each. At head_dim 256 neither the
        registers have room for 128 rows nor, on all GPUs, the shared memory for a second tile.
        """
        return cls(128, 8, 2) if head_dim <= 128 else cls(64, 4, 1)


AttendCodes = Callable[[dict[str, Any], tuple[int, int, int]], tuple[Tensor, Tensor]]
"""``attend_codes(arguments, grid)``: rows over the pages that they see, with the arguments and the grid of
`prefill_kernel`. Returns float32 [num_kv_heads, rows, head_dim], sums in the coded space of the values, in the order
of `_channel`, and [2, num_kv_heads, rows], each row's largest score in base 2 and the sum of its weights. What is
there of the rows of a program that sees no page is not read."""


def attend_prefill(
    q: Tensor,
    wide: WideBatch,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    *,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of a step's queries over one layer's cache.

    Args:
        q: [tokens, num_heads, head_dim] of any floating dtype up to 32 bits, after q/k norm and RoPE; the last axis
            is contiguous. Head h reads KV head h // (num_heads / num_kv_heads).
        wide: what `append_chunk` returned for this step.
        layer: the layer, this step's tokens appended.
        inputs: the batch.
        scale: factor of q . k.
        sliding_window: tokens that a query sees, itself included; None where it sees all before it.
        sink_logits: float32 [num_heads], a learned logit per head that takes part in the softmax and has no value.

    Returns:
        [tokens, num_heads, head_dim] in q's dtype.
    """
    return attend_prefill_with(
        None, q, wide, layer, inputs, scale, sliding_window=sliding_window, sink_logits=sink_logits
    )


def attend_prefill_with(
    attend_codes: AttendCodes | None,
    q: Tensor,
    wide: WideBatch,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    *,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """`attend_prefill`, with something else for the pages; None where the kernel takes them itself."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // layer.pages.shape[2]
    longest = max((step.end - step.start for step in inputs.sequences), default=0) * group
    if not longest:
        return out
    blocks = Blocks.of(q.shape[2])
    prepared = query_memory(q, layer)
    arguments = prepare_arguments(q, prepared, layer)
    prepare_kernel[(triton.cdiv(arguments["rows"], arguments["ROWS"]), layer.pages.shape[2])](
        **arguments, num_warps=prepare_warps(q.shape[2])
    )
    arguments = prefill_arguments(
        prepared, wide, out, layer, inputs, scale, blocks, sliding_window=sliding_window, sink_logits=sink_logits
    )
    grid = triton.cdiv(longest, blocks.rows), layer.pages.shape[2], len(inputs.sequences)
    if attend_codes is not None:
        arguments["sums"], arguments["stats"] = attend_codes(arguments, grid)
    prefill_kernel[grid](**arguments, num_warps=blocks.warps, num_stages=blocks.stages)
    return out


# --- queries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedQueries:
    """Queries as the tensor core takes them; row r of a KV head is query r // group, head r % group of its group.

    Attributes:
        rows: float16 [1 to 3, num_kv_heads, rows, n], n as in `CodingTables`: as they are; in the coded space of the
            keys, kept channels zeroed, in the order of `_channel`; multiplied with the mean key, what goes with the
            cosines in one half and with the sines in the other.
        kept: float16 [num_kv_heads, rows, 16], the kept channels. None where there are none.
        factor: float32 [num_kv_heads, rows], a power of two that was taken out of all of these.
    """

    rows: Tensor
    kept: Tensor | None
    factor: Tensor


def query_memory(q: Tensor, layer: PagedLayers) -> PreparedQueries:
    """Where to leave the prepared queries of a step."""
    tables, heads = layer.tables, layer.pages.shape[2]
    rows, padded = q.shape[0] * q.shape[1] // heads, triton.next_power_of_2(q.shape[2])
    parts = 1 if tables.key.kind == "wide" else 2 if tables.mean is None else 3
    return PreparedQueries(
        q.new_empty(parts, heads, rows, padded, dtype=torch.float16),
        q.new_empty(heads, rows, _KEPT.value, dtype=torch.float16) if tables.places.num_kept else None,
        q.new_empty(heads, rows, dtype=torch.float32),
    )


def prepare_arguments(q: Tensor, prepared: PreparedQueries, layer: PagedLayers) -> dict[str, Any]:
    """All arguments of `prepare_kernel`."""
    tables, padded = layer.tables, prepared.rows.shape[-1]
    return {
        "q": q,
        "queries": prepared.rows,
        "kept": prepared.kept,
        "factor": prepared.factor,
        "matrix": tables.query_matrix,
        "kept_channels": tables.kept_channels,
        "mean": tables.mean,
        "rows": prepared.factor.shape[1],
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "GROUP": prepared.factor.shape[1] // q.shape[0],
        "NUM_KEPT": tables.places.num_kept,
        "CODE": tables.key,
        "HEAD_DIM": q.shape[2],
        "PADDED": padded,
        "ROWS": 32,
    }


def prepare_warps(head_dim: int) -> int:
    """Of a program of `prepare_kernel`, whose rows' sums are all in registers."""
    return 4 if head_dim <= 128 else 8


@triton.jit(do_not_specialize=["rows"])
def prepare_kernel(
    q,
    queries,
    kept,
    factor,
    matrix,
    kept_channels,
    mean,
    rows,
    q_token,
    q_head,
    GROUP: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    CODE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Prepare ROWS queries of one KV head. Grid: (blocks of queries, num_kv_heads)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    q += (row // GROUP).to(tl.int64) * q_token + (head * GROUP + row % GROUP) * q_head
    kept_channels += head * NUM_KEPT
    column = tl.arange(0, PADDED)[None, :]
    plain = tl.load(q + column, mask=live & (column < HEAD_DIM), other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(plain), 1, keep_dims=True)

    if CODE.kind != "wide":
        channel, inside = _channel(column, CODE, 2, HEAD_DIM)
        if matrix is None:
            coded = _without(
                tl.load(q + channel, mask=live & inside, other=0.0).to(tl.float32), channel, kept_channels, NUM_KEPT
            )
        else:
            unit = _power_of_two(largest)
            matrix += head * (HEAD_DIM * PADDED)
            coded = tl.zeros_like(plain)
            for start in range(0, HEAD_DIM, _SLICE):
                source = start + tl.arange(0, _SLICE)
                part = tl.load(q + source[None, :], mask=live & (source[None, :] < HEAD_DIM), other=0.0)
                part = _without(part.to(tl.float32) / unit, source[None, :], kept_channels, NUM_KEPT)
                place = source[:, None] * PADDED + channel
                slab = tl.load(matrix + place, mask=(source[:, None] < HEAD_DIM) & inside, other=0.0)
                coded = tl.dot(part.to(tl.float16), to_f16(slab), coded)
            coded *= unit
        largest = tl.maximum(largest, tl.max(tl.abs(coded), 1, keep_dims=True))

    if mean is not None:
        turn = tl.arange(0, PADDED // 2)[None, :]
        within = turn < HALF
        first = tl.load(q + turn, mask=live & within, other=0.0).to(tl.float32)
        second = tl.load(q + HALF + turn, mask=live & within, other=0.0).to(tl.float32)
        mean += head * HEAD_DIM
        mean_first = tl.load(mean + turn, mask=within, other=0.0)
        mean_second = tl.load(mean + HALF + turn, mask=within, other=0.0)
        with_cos = first * mean_first + second * mean_second
        with_sin = second * mean_first - first * mean_second
        largest = tl.maximum(largest, tl.max(tl.abs(with_cos), 1, keep_dims=True))
        largest = tl.maximum(largest, tl.max(tl.abs(with_sin), 1, keep_dims=True))

    unit = _power_of_two(largest) / _LARGEST_QUERY
    index = head.to(tl.int64) * rows + row
    tl.store(factor + index, unit, mask=live)
    part = tl.num_programs(1).to(tl.int64) * rows * PADDED
    place = queries + index * PADDED
    tl.store(place + column, (plain / unit).to(tl.float16), mask=live)
    if CODE.kind != "wide":
        tl.store(place + part + column, (coded / unit).to(tl.float16), mask=live)
    if mean is not None:
        tl.store(place + 2 * part + turn, (with_cos / unit).to(tl.float16), mask=live)
        tl.store(place + 2 * part + PADDED // 2 + turn, (with_sin / unit).to(tl.float16), mask=live)
    if kept is not None:
        number = tl.arange(0, _KEPT)[None, :]
        channel = tl.load(kept_channels + number, mask=number < NUM_KEPT, other=0)
        value = tl.load(q + channel, mask=live & (number < NUM_KEPT), other=0.0).to(tl.float32)
        tl.store(kept + index * _KEPT + number, (value / unit).to(tl.float16), mask=live)


@triton.jit
def _without(x, channel, kept_channels, NUM_KEPT: tl.constexpr):
    for kept in tl.static_range(NUM_KEPT):
        x = tl.where(channel == tl.load(kept_channels + kept), 0.0, x)
    return x


@triton.jit
def _power_of_two(x):
    """The largest power of two up to x, which is positive; within 2^-100 and 2^100."""
    exponent = x.to(tl.int32, bitcast=True) >> 23
    return (tl.minimum(tl.maximum(exponent, 27), 227) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _channel(column, CODE: tl.constexpr, TOGETHER: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The channel in each column of an unpacked tile, and whether there is one.

    The codes of TOGETHER neighbouring words stay neighbours; behind the first of each of them come their second
    ones, and so on. Words are filled up to a power of two.
    """
    PLANES: tl.constexpr = _WORD_BITS // CODE.bits
    WORDS: tl.constexpr = HEAD_DIM // PLANES
    plane = column // TOGETHER % PLANES
    word = column // (TOGETHER * PLANES) * TOGETHER + column % TOGETHER
    return plane * WORDS + word, word < WORDS


# --- attention -------------------------------------------------------------------------------------------------


def prefill_arguments(
    prepared: PreparedQueries,
    wide: WideBatch,
    out: Tensor,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    blocks: Blocks,
    *,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> dict[str, Any]:
    """All arguments of `prefill_kernel`."""
    tables, fmt = layer.tables, layer.layout.format
    pages, tokens = layer.pages.view(torch.int16), saturated_f16(wide.tokens)
    return {
        "queries": prepared.rows,
        "kept": prepared.kept,
        "factor": prepared.factor,
        "sums": None,
        "stats": None,
        "out": out,
        "pages": pages,
        "pairs": layer.pages.view(torch.int32),
        "wide": tokens,
        "block_table": inputs.block_table,
        "query_start": inputs.query_start,
        "context_len": inputs.context_len,
        "matrix": tables.output_matrix,
        "cos": tables.rope and tables.rope.cos,
        "sin": tables.rope and tables.rope.sin,
        "sink_logits": sink_logits,
        "scale": scale * math.log2(math.e),
        "sliding_window": sliding_window,
        "rows": prepared.factor.shape[1],
        "pages_page": pages.stride(1),
        "pages_head": pages.stride(2),
        "wide_side": tokens.stride(0),
        "table_row": inputs.block_table.stride(0),
        "GROUP": prepared.factor.shape[1] // out.shape[0],
        "CHUNK": inputs.rule == "chunk",
        "KEY": tables.key,
        "VALUE": tables.value,
        "PLACES": tables.places,
        "SINKS": fmt.sinks,
        "RECENT": fmt.recent,
        "HEAD_DIM": out.shape[2],
        "PADDED": prepared.rows.shape[-1],
        "ROWS": blocks.rows,
    }


@triton.jit(do_not_specialize=["rows", "table_row"])
def prefill_kernel(
    queries,
    kept,
    factor,
    sums,
    stats,
    out,
    pages,
    pairs,
    wide,
    block_table,
    query_start,
    context_len,
    matrix,
    cos,
    sin,
    sink_logits,
    scale,
    sliding_window,
    rows,
    pages_page,
    pages_head,
    wide_side,
    table_row,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PLACES: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one sequence and KV head. Grid: (blocks of rows, num_kv_heads, batch); the last rows, which see
    the most, come first. The arguments are those of `prefill_arguments`."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    context = tl.load(context_len + sequence)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first_row >= count * GROUP:
        return

    # Positions of the rows, and of the first and last of them.
    low = context + first_row // GROUP
    high = context + (tl.minimum(first_row + ROWS, count * GROUP) - 1) // GROUP
    row = first_row + tl.arange(0, ROWS)
    live = row < count * GROUP
    position = tl.minimum(context + row // GROUP, high)
    limit = _NO_LIMIT
    if CHUNK:
        limit = tl.where(count > 1, tl.maximum(context, SINKS), _NO_LIMIT)
    coded_end = _coded_end(position, limit, SINKS, RECENT)
    coded_low, coded_high = _coded_end(low, limit, SINKS, RECENT), _coded_end(high, limit, SINKS, RECENT)
    seen = position * 0
    seen_low, seen_high = 0, 0
    if sliding_window is not None:
        seen = position + 1 - sliding_window
        seen_low, seen_high = tl.maximum(low + 1 - sliding_window, 0), tl.maximum(high + 1 - sliding_window, 0)

    index = head.to(tl.int64) * rows + start * GROUP + row
    part = tl.num_programs(1).to(tl.int64) * rows * PADDED
    place = queries + index[:, None] * PADDED
    row_scale = tl.load(factor + index, mask=live, other=1.0) * scale
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sink_logits is not None:
        highest = tl.load(sink_logits + head * GROUP + row % GROUP).to(tl.float32) * _LOG2_E
        total += 1.0
    output = tl.zeros([ROWS, PADDED], tl.float32)

    # Pages, those that all rows see as a whole apart from the others.
    end = tl.cdiv(coded_high - SINKS, _TILE)
    first = tl.minimum(tl.maximum(seen_low - SINKS, 0) // _TILE, end)
    if first < end:
        if sums is None:
            column = tl.arange(0, PADDED)[None, :]
            q_kept, q_cos, q_sin = None, None, None
            if KEY.kind == "wide":
                q = tl.load(place + column, mask=live[:, None], other=0.0)
            else:
                q = tl.load(place + part + column, mask=live[:, None], other=0.0)
            if kept is not None:
                q_kept = tl.load(
                    kept + index[:, None] * _KEPT + tl.arange(0, _KEPT)[None, :], mask=live[:, None], other=0.0
                )
            if cos is not None:
                turn = tl.arange(0, PADDED // 2)[None, :]
                q_cos = tl.load(place + 2 * part + turn, mask=live[:, None], other=0.0)
                q_sin = tl.load(place + 2 * part + PADDED // 2 + turn, mask=live[:, None], other=0.0)
            table = block_table + sequence.to(tl.int64) * table_row
            for page in tl.range(first, end):
                token = tl.arange(0, _TILE)
                if KEY.kind != "wide":
                    token = token % 8 * 8 + token // 8
                number = tl.load(table + page).to(tl.int64)
                record = pages + number * pages_page + head * pages_head
                words = pairs + number * (pages_page // 2) + head * (pages_head // 2)
                at = SINKS + page * _TILE
                keys = _keys(record, words, token, KEY, PLACES, HEAD_DIM, PADDED)
                scores = tl.dot(q, tl.trans(keys))
                if kept is not None:
                    scores = tl.dot(q_kept, tl.trans(_kept(record, token, PLACES)), scores)
                if cos is not None:
                    scores = tl.dot(q_cos, tl.trans(_turns(cos, at + token, coded_high, HEAD_DIM, PADDED)), scores)
                    scores = tl.dot(q_sin, tl.trans(_turns(sin, at + token, coded_high, HEAD_DIM, PADDED)), scores)
                if (at + _TILE > coded_low) | (at < seen_high):
                    scores = _coded_seen(scores, (at + token)[None, :], seen[:, None], coded_end[:, None])
                values = _values(record, words, token, coded_high - at, VALUE, PLACES, HEAD_DIM, PADDED)
                highest, total, output = _add(scores, values, row_scale, highest, total, output)
        else:
            lengths = stats + tl.num_programs(1).to(tl.int64) * rows
            highest, total, output = _joined(sums, stats, lengths, index, live, highest, total, PADDED)
        if VALUE.kind != "wide":
            output = _turned(output, place + part, live, matrix, head * (HEAD_DIM * PADDED), VALUE, HEAD_DIM, PADDED)

    # 16-bit tokens: the sinks, then all from the first position on that some row does not read through the codes.
    column = tl.arange(0, PADDED)[None, :]
    q = tl.load(place + column, mask=live[:, None], other=0.0)
    sinks = tl.minimum(high + 1, SINKS)
    sinks = tl.where(seen_low < sinks, sinks, 0)
    sink_tiles = tl.cdiv(sinks, _TILE)
    begin = tl.maximum(coded_low, seen_low)
    tiles = tl.cdiv(tl.maximum(high + 1 - begin, 0), _TILE)
    wide += head * HEAD_DIM + _wide_start(context_len, sequence, start, SINKS, RECENT) * (
        tl.num_programs(1) * HEAD_DIM
    )
    left_out = _coded_end(context - 1, _NO_LIMIT, SINKS, RECENT) - SINKS
    for i in tl.range(0, sink_tiles + tiles):
        at = tl.where(i < sink_tiles, i * _TILE, begin + (i - sink_tiles) * _TILE)
        stop = tl.where(i < sink_tiles, sinks, high + 1)
        token = at + tl.arange(0, _TILE)
        source = (token - tl.where(i < sink_tiles, 0, left_out))[:, None].to(tl.int64) * (
            tl.num_programs(1) * HEAD_DIM
        )
        inside = (token < stop)[:, None] & (column < HEAD_DIM)
        keys = tl.load(wide + source + column, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys))
        if (at + _TILE > tl.minimum(low + 1, stop)) | (at < tl.maximum(coded_high, seen_high)):
            token = tl.where(token < stop, token, _NO_LIMIT)
            scores = _wide_seen(scores, token[None, :], position[:, None], seen[:, None], coded_end[:, None], SINKS)
        values = tl.load(wide + wide_side + source + column, mask=inside, other=0.0)
        highest, total, output = _add(scores, values, row_scale, highest, total, output)

    index = (start * GROUP + row).to(tl.int64)
    place = index // GROUP * (tl.num_programs(1) * GROUP) + head * GROUP + index % GROUP
    result = (output / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * HEAD_DIM + column, result, mask=live[:, None] & (column < HEAD_DIM))


@triton.jit
def _coded_end(position, limit, SINKS: tl.constexpr, RECENT: tl.constexpr):
    """`coded_until` of inputs.py; `limit` is that of the `chunk` rule."""
    return tl.minimum(SINKS + tl.maximum(position + 1 - SINKS - RECENT, 0), limit)


@triton.jit
def _coded_seen(scores, token, seen, coded_end):
    """Scores of coded tokens [1, n]; those that a row [m, 1] doesn't read through the codes become -inf."""
    return tl.where((token >= seen) & (token < coded_end), scores, float("-inf"))


@triton.jit
def _wide_seen(scores, token, position, seen, coded_end, SINKS: tl.constexpr):
    """The same of 16-bit tokens."""
    visible = (token <= position) & (token >= seen) & ((token < SINKS) | (token >= coded_end))
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _wide_start(context_len, sequence, start, SINKS: tl.constexpr, RECENT: tl.constexpr):
    """Where a sequence begins in `WideBatch.tokens`: behind the windows and new tokens of those before it."""
    total = start.to(tl.int64)
    for first in range(0, sequence, 32):
        other = first + tl.arange(0, 32)
        context = tl.load(context_len + other, mask=other < sequence, other=0)
        total += tl.sum(context - tl.maximum(context - SINKS - RECENT, 0), 0)
    return total


@triton.jit
def _add(scores, values, row_scale, highest, total, output):
    """Take a tile into the running softmax (in base 2) and its sum of values."""
    new = tl.maximum(highest, tl.max(scores, 1) * row_scale)
    weights = tl.exp2(scores * row_scale[:, None] - new[:, None])
    decay = tl.exp2(highest - new)
    total = total * decay + tl.sum(weights, 1)
    output = tl.dot(weights.to(tl.float16), values, output * decay[:, None])
    return new, total, output


@triton.jit
def _joined(sums, largest, lengths, index, live, highest, total, PADDED: tl.constexpr):
    """Take what others found of the pages into a running softmax that has seen no value."""
    column = tl.arange(0, PADDED)[None, :]
    largest = tl.load(largest + index, mask=live, other=0.0)
    new = tl.maximum(highest, largest)
    decay = tl.exp2(largest - new)
    total = total * tl.exp2(highest - new) + tl.load(lengths + index, mask=live, other=0.0) * decay
    output = tl.load(sums + index[:, None] * PADDED + column, mask=live[:, None], other=0.0)
    return new, total, output * decay[:, None]


@triton.jit
def _turned(
    output, memory, live, matrix, matrix_start, CODE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Rows of values in coded space, in the order of `_channel`, as rows of values. `memory` is float16 [n, 1]."""
    column = tl.arange(0, PADDED)[None, :]
    unit = _power_of_two(tl.max(tl.abs(output), 1, keep_dims=True))
    tl.store(memory + column, (output / unit).to(tl.float16), mask=live[:, None])
    tl.debug_barrier()
    turned = tl.zeros_like(output)
    for first in range(0, PADDED, _SLICE):
        source = first + tl.arange(0, _SLICE)
        channel, inside = _channel(source[:, None], CODE, 1, HEAD_DIM)
        if matrix is None:
            slab = ((channel == column) & inside).to(tl.float16)
        else:
            place = matrix + matrix_start + channel * PADDED + column
            slab = to_f16(tl.load(place, mask=inside, other=0.0))
        part = tl.load(memory + source[None, :], mask=live[:, None], other=0.0)
        turned = tl.dot(part, slab, turned)
    return turned * unit


# --- operands --------------------------------------------------------------------------------------------------


@triton.jit
def _keys(
    record, words, token, CODE: tl.constexpr, PLACES: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """A page's keys, float16 [tokens, PADDED]; `token` says which, coded ones in the order of their slots."""
    if CODE.kind == "wide":
        keys = _wide(record + PLACES.key_codes, token, True, HEAD_DIM, PADDED)
    else:
        PLANES: tl.constexpr = _WORD_BITS // CODE.bits
        PAIRS: tl.constexpr = PADDED // PLANES // 2
        WORDS: tl.constexpr = HEAD_DIM // PLANES // 2
        slot, pair = tl.arange(0, _TILE)[:, None], tl.arange(0, PAIRS)[None, :]
        stored = tl.load(words + PLACES.key_codes // 2 + slot * WORDS + pair, mask=pair < WORDS, other=0)
        codes = _numbers(tl.reshape(_planes(stored, CODE.bits), [_TILE, PADDED // 2]), CODE)
        scale, offset = _grids(record + PLACES.key_grids + token * CODE.parts, True, CODE)
        keys = _dequantised(codes, scale[:, None], offset[:, None], CODE)
    return keys


@triton.jit
def _values(
    record,
    words,
    token,
    end,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A page's values, as `_keys`; those of tokens from `end` on, which may hold anything, finite."""
    written = token < end
    if CODE.kind == "wide":
        values = _wide(record + PLACES.value_codes, token, written[:, None], HEAD_DIM, PADDED)
    else:
        PLANES: tl.constexpr = _WORD_BITS // CODE.bits
        COLUMNS: tl.constexpr = PADDED // PLANES
        WORDS: tl.constexpr = HEAD_DIM // PLANES
        word, pair = tl.arange(0, COLUMNS)[:, None], tl.arange(0, _TILE // 2)[None, :]
        stored = tl.load(words + PLACES.value_codes // 2 + word * (_TILE // 2) + pair, mask=word < WORDS, other=0)
        planes = tl.permute(_planes(stored, CODE.bits), [0, 2, 1])
        codes = _numbers(tl.reshape(planes, [PADDED, _TILE // 2]), CODE)
        scale, offset = _grids(record + PLACES.value_grids + token * CODE.parts, written, CODE)
        values = tl.trans(_dequantised(codes, scale[None, :], offset[None, :], CODE))
    return values


@triton.jit
def _wide(plane, token, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """An uncoded plane, float16 [tokens, PADDED]."""
    column = tl.arange(0, PADDED)[None, :]
    stored = tl.load(plane + token[:, None] * HEAD_DIM + column, mask=live & (column < HEAD_DIM), other=0)
    return to_f16(stored.to(tl.bfloat16, bitcast=True).to(tl.float32))


@triton.jit
def _planes(pairs, BITS: tl.constexpr):
    """Int32 [a, b] shifted down to each of its planes, [a, b, 16 / BITS]. What a thread joins stays in its hands."""
    planes = tl.join(pairs, pairs >> 8)
    if BITS <= 4:
        planes = tl.join(planes, planes >> 4)
    if BITS == 2:
        planes = tl.join(planes, planes >> 2)
    return tl.reshape(planes, [pairs.shape[0], pairs.shape[1], _WORD_BITS // BITS])


@triton.jit
def _numbers(pairs, CODE: tl.constexpr):
    """Codes in the low bits of each half of int32 [a, b], as float16 [a, 2 b]: 1024 + code, or an e4m3 / 256."""
    if CODE.kind == "e4m3":
        pairs = ((pairs & 0x007F007F) << 7) | ((pairs & 0x00800080) << 8)
    else:
        MASK: tl.constexpr = ((1 << CODE.bits) - 1) * 0x10001
        pairs = (pairs & MASK) | 0x64006400
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]]).to(tl.float16, bitcast=True)


@triton.jit
def _grids(place, live, CODE: tl.constexpr):
    """Scale and offset of each token, float16; 0 where it is not `live`."""
    first = tl.load(place, mask=live, other=0)
    second = first
    if CODE.parts == 2:
        second = tl.load(place + 1, mask=live, other=0)
    if CODE.kind == "e4m3":
        scale = first.to(tl.float16, bitcast=True) * _E4M3_TO_F16
        offset = scale
    elif CODE.parts == 2:
        scale, offset = first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True)
    else:
        # As `load_affine` of subten/formats/affine.py; all but the last product is exact.
        scale = ((first >> 1) & _SCALE_BITS).to(tl.float16, bitcast=True)
        offset = ((first & _OFFSET_MASK) | 0x6400).to(tl.float16, bitcast=True)
        offset = (offset * (1 / _PER_STEP) - _MIDDLE) * scale
    return scale, offset


@triton.jit
def _dequantised(codes, scale, offset, CODE: tl.constexpr):
    if CODE.kind == "e4m3":
        numbers = codes * scale
    else:
        numbers = tl.fma(codes - 1024.0, tl.broadcast_to(scale, codes.shape), tl.broadcast_to(offset, codes.shape))
    return numbers


@triton.jit
def _kept(record, token, PLACES: tl.constexpr):
    """A page's kept channels, float16 [tokens, _KEPT]."""
    number = tl.arange(0, _KEPT)[None, :]
    place = record + PLACES.kept_pair + token[:, None] * PLACES.num_kept + number
    return tl.load(place, mask=number < PLACES.num_kept, other=0).to(tl.float16, bitcast=True)


@triton.jit
def _turns(table, position, end, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """The cosines, or sines, at each position before `end`, float16 [tokens, PADDED / 2]."""
    turn, position = tl.arange(0, PADDED // 2)[None, :], position[:, None]
    mask = (position < end) & (turn < HEAD_DIM // 2)
    return tl.load(table + position * (HEAD_DIM // 2) + turn, mask=mask, other=0.0).to(tl.float16)
