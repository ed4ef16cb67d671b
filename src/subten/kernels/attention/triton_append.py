"""The append on a GPU: a decode step in one launch per layer and one for all layers, and chunks of any size.

A decode step of a layer is `append_decode`: q/k norm and RoPE (where asked for), the new token into its window slot,
and the query into the keys' coded space, so that attention only reads what it needs. The step's coding is apart from
it, `encode_leaving` of triton_encode.py: one launch for all layers.

Which token a step codes. A token must be coded before a query reads it through the codes (`KVFormat.coded_tokens`),
and coding takes longer than everything else in an append, as it goes over the coordinates one after the other. So a
step does not code the token that leaves the window now, but the one that leaves in the next step: it lies in the
window since `recent - 1` steps, no query of this step reads its codes, and nothing of this step overwrites it. The
launch for all layers can run beside the layers, on a stream of its own, and must be done when the step ends. It is
exactly one token per sequence and step, so that every step takes the same time. The price is a page that is needed a
step earlier: the block table must have room for the tokens of `tokens_in_pages`.

With `recent` = 1 the token that leaves next is the step's own; then the launch belongs behind the last layer's
append. With `recent` = 0 (fp8 and bf16) there is no window, and a query reads its own token through the codes:
`append_decode` codes it at once. These formats take no passes, so this is a small launch.

Chunks are `append_chunk`: the tokens that leave are coded by the same kernel, the windows are written by torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subten.formats.spec import KVFormat
from subten.kernels.attention.append import _window_moves
from subten.kernels.attention.device_cache import PagedLayers, tokens_in_pages
from subten.kernels.attention.gluon_plan import head_tiles
from subten.kernels.attention.gluon_tables import LARGEST_SCORE, Q_STEPS
from subten.kernels.attention.inputs import AttentionInputs, QKNorm, SequenceStep, WideTokens
from subten.kernels.attention.triton_encode import encode_tokens, to_f16
from subten.kernels.attention.triton_heads import heads, rounded
from subten.kernels.launches import can_overlap
from subten.kernels.rope import RopeTable

_WARPS = 8
_ROWS = 16
"""Queries of a program: as many as a tensor core takes at a time."""
_MOST_COLUMNS = 128
_Q_STEPS, _LARGEST_SCORE = tl.constexpr(Q_STEPS), tl.constexpr(LARGEST_SCORE)
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds a float32 of less than 2^22 to the nearest integer."""


@dataclass(frozen=True)
class DecodeQuery:
    """The queries of a decode step as attention reads them.

    Attributes:
        q: [batch, num_heads, head_dim] after norm and RoPE, in the dtype it came in: for the windows and the mean
            key.
        coded: float16 [batch, num_heads, head_dim], zero at the kept channels and taken into the coded space of the
            keys; None where keys are coded in their own space.
        kept: float32 [batch, num_heads, num_kept], q at the kept channels.
        steps: instead of `coded`, for the Gluon kernel, the coded query as integers: int8 [batch, num_kv_heads,
            blocks, tiles, operands, 8, bytes]. Of a tile's four heads upper and lower halves alternate along the axis
            of 8; operands and bytes are as codes lie in a key record. Heads that fill up a tile are not written.
        numbers: float32 [batch, num_kv_heads, blocks * tiles * 4, 4], what an integer step is worth, an eighth of the
            sum over the coded query, and q at the two kept channels.
    """

    q: Tensor
    coded: Tensor | None
    kept: Tensor
    steps: Tensor | None = None
    numbers: Tensor | None = None


# --- decode ----------------------------------------------------------------------------------------------------


def append_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: PagedLayers,
    inputs: AttentionInputs,
    *,
    norm: QKNorm | None = None,
    rope: RopeTable | None = None,
    integer: bool = False,
) -> DecodeQuery:
    """Append one new token per sequence to a layer, and prepare its query.

    Nothing is read back to the host, so the call can be captured in a CUDA graph.

    Args:
        q: [batch, num_heads, head_dim] of any floating dtype up to 32 bits; the last axis is contiguous.
        k: [batch, num_kv_heads, head_dim] of the same dtype; likewise.
        v: the same shape and dtype as k.
        layer: one layer, updated in place.
        inputs: the batch; each sequence has one new token, at position `context_len`. Sequences with a negative
            `window_slot` (which fill up a batch) are not appended.
        norm: of q and k, where it is still to be done.
        rope: to rotate q and k by their position, where that is still to be done; after the norm.
        integer: whether the coded queries are wanted as integers, for the Gluon kernel.
    """
    out = query_memory(q, layer, changed=norm is not None or rope is not None, integer=integer)
    step = None if layer.layout.format.recent else k.new_empty(2, *k.shape, dtype=layer.layout.wide_dtype)
    arguments = append_arguments(q, k, v, out, step, layer, inputs, norm, rope)
    blocks = triton.cdiv(len(q) * arguments["GROUP"], _ROWS)
    append_kernel[(blocks, k.shape[1], arguments["PARTS"] + 1)](
        **arguments, num_warps=_WARPS, enable_fp_fusion=False, launch_pdl=arguments["OVERLAP"]
    )
    if step is not None:
        encode_tokens(layer, step, inputs.context_len, inputs)
    return out


def query_memory(q: Tensor, layer: PagedLayers, *, changed: bool, integer: bool = False) -> DecodeQuery:
    """Where to leave the queries of a step; q itself where norm and RoPE do not change it."""
    (batch, num_heads, head_dim), num_kv_heads = q.shape, layer.pages.shape[2]
    coded = layer.tables.query_matrix is not None
    steps = numbers = None
    if integer:
        tiles = head_tiles(num_heads // num_kv_heads)
        blocks = triton.cdiv(num_heads // num_kv_heads, 4 * tiles)
        operands, size = (2, 32) if head_dim == 64 else (4, head_dim // 4)
        steps = q.new_empty(batch, num_kv_heads, blocks, tiles, operands, 8, size, dtype=torch.int8)
        numbers = q.new_empty(batch, num_kv_heads, blocks * tiles * 4, 4, dtype=torch.float32)
    return DecodeQuery(
        torch.empty_like(q, memory_format=torch.contiguous_format) if changed else q,
        q.new_empty(q.shape, dtype=torch.float16) if coded and not integer else None,
        q.new_empty(batch, num_heads, layer.tables.places.num_kept, dtype=torch.float32),
        steps,
        numbers,
    )


def append_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: DecodeQuery,
    step: Tensor | None,
    layer: PagedLayers,
    inputs: AttentionInputs,
    norm: QKNorm | None,
    rope: RopeTable | None,
) -> dict[str, Any]:
    """All arguments of `append_kernel`.

    Args:
        q: see `append_decode`.
        k: likewise.
        v: likewise.
        out: where to leave the queries.
        step: [2, batch, num_kv_heads, head_dim], where to leave the tokens of a cache without recent window.
        layer: see `append_decode`.
        inputs: likewise.
        norm: likewise.
        rope: likewise.
    """
    tables, layout = layer.tables, layer.layout
    batch, num_heads, head_dim = q.shape
    padded = triton.next_power_of_2(head_dim)
    group = num_heads // k.shape[1]
    columns = min(_MOST_COLUMNS, padded) if out.steps is not None else _columns(batch * group, padded)
    changed = out.q is not q
    coded = out.coded is not None or out.steps is not None
    parts = int(changed or out.kept.numel() > 0)
    if coded:
        # As integers all columns of a query share one step: one program has them all.
        parts = 1 if out.steps is not None else triton.cdiv(head_dim, columns)
    return {
        "q": q,
        "k": k,
        "v": v,
        "q_out": out.q if changed else None,
        "q_coded": out.coded,
        "q_kept": out.kept if tables.places.num_kept and out.steps is None else None,
        "q_steps": out.steps,
        "q_numbers": out.numbers,
        "step": step,
        "windows": layer.windows[0],
        "context_len": inputs.context_len,
        "window_slot": inputs.window_slot,
        "query_matrix": tables.query_matrix,
        "kept_channels": tables.kept_channels,
        "q_weight": norm and norm.q_weight,
        "k_weight": norm and norm.k_weight,
        "cos": rope and rope.cos,
        "sin": rope and rope.sin,
        "eps": norm.eps if norm else 0.0,
        "batch": batch,
        **{f"{name}_row": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v))},
        **{f"{name}_head": x.stride(1) for name, x in (("q", q), ("k", k), ("v", v))},
        **{f"windows_{axis}": layer.windows.stride(i + 1) for i, axis in enumerate(("slot", "side", "head"))},
        "GROUP": group,
        "TILES": head_tiles(group),
        "NUM_KEPT": tables.places.num_kept,
        "SINKS": layout.format.sinks,
        "RING": layout.format.ring_size,
        "HEAD_DIM": head_dim,
        "PADDED": padded,
        "ROWS": _ROWS,
        "TOKENS": triton.next_power_of_2(min(batch, triton.cdiv(_ROWS, group))),
        "COLUMNS": columns,
        "PARTS": parts,
        "OVERLAP": can_overlap(q.device),
    }


def _columns(queries: int, padded: int) -> int:
    """Columns of the query matrix in a program, for so many queries of a KV head."""
    return min(32 if queries <= 4 * _ROWS else 64, padded)


@triton.jit
def append_kernel(
    q,
    k,
    v,
    q_out,
    q_coded,
    q_kept,
    q_steps,
    q_numbers,
    step,
    windows,
    context_len,
    window_slot,
    query_matrix,
    kept_channels,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    batch,
    q_row,
    k_row,
    v_row,
    q_head,
    k_head,
    v_head,
    windows_slot,
    windows_side,
    windows_head,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of one KV head some columns of ROWS coded queries, or the new keys and values of TOKENS sequences.

    Loads come in the order in which they are waited for: what is no result of the kernel before, which may still be
    running, then a position's rotation and the heads, all before the first number is used.

    Grid: (blocks of queries, num_kv_heads, PARTS + 1). The arguments are those of `append_arguments`.
    """
    head, part = tl.program_id(1), tl.program_id(2)
    if part == PARTS:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
        _append_tokens(
            k + token.to(tl.int64) * k_row + head * k_head,
            v + token.to(tl.int64) * v_row + head * v_head,
            token,
            head,
            step,
            windows + head * windows_head,
            windows_slot,
            windows_side,
            context_len,
            window_slot,
            k_weight,
            cos,
            sin,
            eps,
            batch,
            SINKS,
            RING,
            HEAD_DIM,
            PADDED,
            OVERLAP,
        )
    else:
        row_of_group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        sequence, of_group = row_of_group // GROUP, row_of_group % GROUP
        _prepare_queries(
            q + sequence.to(tl.int64) * q_row + (head * GROUP + of_group) * q_head,
            (sequence * tl.num_programs(1) + head) * GROUP + of_group,
            sequence,
            head,
            part,
            q_out,
            q_coded,
            q_kept,
            q_steps,
            q_numbers,
            of_group,
            query_matrix,
            kept_channels,
            context_len,
            q_weight,
            cos,
            sin,
            eps,
            batch,
            GROUP,
            TILES,
            NUM_KEPT,
            HEAD_DIM,
            PADDED,
            COLUMNS,
            PARTS,
            OVERLAP,
        )


@triton.jit
def _prepare_queries(
    q,
    query,
    sequence,
    head,
    part,
    q_out,
    q_coded,
    q_kept,
    q_steps,
    q_numbers,
    of_group,
    query_matrix,
    kept_channels,
    context_len,
    weight,
    cos,
    sin,
    eps,
    batch,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries at `q` [n, 1] of one KV head, which are the results' number `query`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    live = sequence < batch
    channel = tl.arange(0, PADDED // 2)[None, :]
    position = tl.load(context_len + sequence, mask=live, other=0)
    if q_coded is not None:
        column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        upper, lower = _load_matrix(query_matrix, head, column, HEAD_DIM, PADDED)
    if q_steps is not None:
        matrices = ()
        for start in tl.static_range(0, PADDED, COLUMNS):
            matrices += (_load_matrix(query_matrix, head, start + tl.arange(0, COLUMNS)[None, :], HEAD_DIM, PADDED),)
    first_kept, second_kept = tl.full([1, PADDED // 2], -1, tl.int32), tl.full([1, PADDED // 2], -1, tl.int32)
    for kept in tl.static_range(NUM_KEPT):
        kept_channel = tl.load(kept_channels + head * NUM_KEPT + kept)
        first_kept = tl.where(channel == kept_channel, kept, first_kept)
        second_kept = tl.where(channel + HALF == kept_channel, kept, second_kept)
    if OVERLAP:
        _wait_for_previous_kernel()
    first, second = heads(q, live, position, weight, cos, sin, eps, HEAD_DIM, PADDED)
    if q_coded is not None:
        coded = _coded(first, second, upper, lower)
        tl.store(q_coded + query * HEAD_DIM + column, to_f16(coded), mask=live & (column < HEAD_DIM))
    if q_steps is not None:
        largest = tl.zeros([first.shape[0], 1], tl.float32)
        total, length = largest, largest
        parts = ()
        for index in tl.static_range(PADDED // COLUMNS):
            coded = _coded(first, second, matrices[index][0], matrices[index][1])
            parts += (coded,)
            of_plane = coded * _plane_factor(index * COLUMNS + tl.arange(0, COLUMNS)[None, :], HEAD_DIM)
            largest = tl.maximum(largest, tl.max(tl.abs(of_plane), 1, keep_dims=True))
            total += tl.sum(coded, 1, keep_dims=True)
            length += tl.sum(tl.abs(coded), 1, keep_dims=True)
        # As small as the halves of an integer and the sums of its products with codes allow.
        unit = tl.maximum(tl.maximum(largest / _Q_STEPS, length * (3.0 / _LARGEST_SCORE)), 1e-20)
        PADDED_GROUP: tl.constexpr = (GROUP + 4 * TILES - 1) // (4 * TILES) * (4 * TILES)
        of_tiles = (sequence * tl.num_programs(1) + head) * PADDED_GROUP + of_group
        for index in tl.static_range(PADDED // COLUMNS):
            column = index * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            _store_integers(q_steps, parts[index], unit, of_tiles, column, live, HEAD_DIM)
        tl.store(q_numbers + of_tiles * 4, unit, mask=live)
        tl.store(q_numbers + of_tiles * 4 + 1, total * 0.125, mask=live)
    if part == 0:
        inside = live & (channel < HALF)
        if q_out is not None:
            place = q_out + query * HEAD_DIM + channel
            tl.store(place, rounded(first, q_out.dtype.element_ty), mask=inside)
            tl.store(place + HALF, rounded(second, q_out.dtype.element_ty), mask=inside)
    if part == PARTS - 1:
        held = live & (channel < HALF)
        if q_steps is not None:
            tl.store(q_numbers + of_tiles * 4 + 2 + first_kept, first, mask=held & (first_kept >= 0))
            tl.store(q_numbers + of_tiles * 4 + 2 + second_kept, second, mask=held & (second_kept >= 0))
        elif NUM_KEPT > 0:
            tl.store(q_kept + query * NUM_KEPT + first_kept, first, mask=held & (first_kept >= 0))
            tl.store(q_kept + query * NUM_KEPT + second_kept, second, mask=held & (second_kept >= 0))


@triton.jit
def _wait_for_previous_kernel():
    """Until all that the kernels before this one have written can be read; the next one may begin meanwhile, up to
    where it waits."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def _load_matrix(query_matrix, head, column, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Columns of a head's query matrix, for the first half of the channels and for the second."""
    line = tl.arange(0, PADDED // 2)[:, None]
    matrix = query_matrix + (head * HEAD_DIM + line) * PADDED + column
    upper = tl.load(matrix, mask=line < HEAD_DIM // 2, other=0.0)
    return upper, tl.load(matrix + HEAD_DIM // 2 * PADDED, mask=line < HEAD_DIM // 2, other=0.0)


@triton.jit
def _coded(first, second, upper, lower):
    """Coded queries, in float32. What a query loses when it is rounded to 16 bit is multiplied as well: with a strong
    bias in the keys it would be most of the error of the scores."""
    first_16, second_16 = to_f16(first), to_f16(second)
    rest = tl.dot(
        to_f16(second - second_16.to(tl.float32)), lower, tl.dot(to_f16(first - first_16.to(tl.float32)), upper)
    )
    return tl.dot(second_16, lower, tl.dot(first_16, upper, rest))


@triton.jit
def _plane_factor(column, HEAD_DIM: tl.constexpr):
    """Codes of odd planes are read two bits further up."""
    return tl.where(column // (HEAD_DIM // 8) % 2 == 1, 0.25, 1.0)


@triton.jit
def _store_integers(q_steps, coded, unit, query, column, live, HEAD_DIM: tl.constexpr):
    """Columns of coded queries as integers of 15 bits, in the order in which the Gluon kernel takes key codes."""
    WORDS: tl.constexpr = HEAD_DIM // 8
    SIZE: tl.constexpr = max(32, HEAD_DIM // 4)
    plane, byte = column // WORDS % 4, column % WORDS * 2 + column // (4 * WORDS)
    value = coded * _plane_factor(column, HEAD_DIM) / unit
    value = tl.clamp((value + _TO_INTEGER) - _TO_INTEGER, -_Q_STEPS, _Q_STEPS)
    upper = tl.floor(value * (1 / 128) + 0.5)
    lower = value - 128.0 * upper
    # Two planes of 16 bytes make one operand of 32, or one plane of 32 or 64.
    PLANES: tl.constexpr = SIZE * 4 // HEAD_DIM
    place = plane // PLANES * (8 * SIZE) + plane % PLANES * 16 + byte
    place += query // 4 * (8 * HEAD_DIM) + query % 4 * (2 * SIZE)
    mask = live & (column < HEAD_DIM)
    tl.store(q_steps + place, upper.to(tl.int8), mask=mask)
    tl.store(q_steps + place + SIZE, lower.to(tl.int8), mask=mask)


@triton.jit
def _append_tokens(
    k,
    v,
    row,
    head,
    step,
    windows,
    windows_slot,
    windows_side,
    context_len,
    window_slot,
    weight,
    cos,
    sin,
    eps,
    batch,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of the new tokens of sequences `row` [n, 1], to their windows and, if that is not None, to `step`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, PADDED // 2)[None, :]
    live = row < batch
    inside = live & (channel < HALF)
    position = tl.load(context_len + row, mask=live, other=0)
    slot = tl.load(window_slot + row, mask=live, other=-1).to(tl.int64)
    in_window = position
    if RING > 0:
        in_window = tl.where(position < SINKS, position, SINKS + (position - SINKS) % RING)
    held = inside & (slot >= 0) & (in_window < SINKS + RING)
    windows += slot * windows_slot + in_window * HEAD_DIM + channel
    if step is not None:
        step += (row * tl.num_programs(1) + head) * HEAD_DIM + channel
        step_side = batch * tl.num_programs(1) * HEAD_DIM
    if OVERLAP:
        _wait_for_previous_kernel()
    values = tl.load(v + channel, mask=inside, other=0.0), tl.load(v + channel + HALF, mask=inside, other=0.0)
    keys = heads(k, live, position, weight, cos, sin, eps, HEAD_DIM, PADDED)
    for half in tl.static_range(2):
        key, value = keys[half], values[half].to(tl.float32)
        if step is not None:
            tl.store(step + half * HALF, rounded(key, step.dtype.element_ty), mask=inside)
            tl.store(step + half * HALF + step_side, rounded(value, step.dtype.element_ty), mask=inside)
        tl.store(windows + half * HALF, rounded(key, windows.dtype.element_ty), mask=held)
        tl.store(windows + half * HALF + windows_side, rounded(value, windows.dtype.element_ty), mask=held)


# --- chunks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WideBatch:
    """The `WideTokens` of all sequences of a step in one piece of memory, one sequence after the other.

    Attributes:
        tokens: [2 (K, V), tokens, num_kv_heads, head_dim] of the cache's wide dtype.
        positions: of each sequence's tokens, int64.
    """

    tokens: Tensor
    positions: tuple[Tensor, ...]

    @property
    def by_sequence(self) -> tuple[WideTokens, ...]:
        """Views of the same memory."""
        parts = self.tokens.split([len(positions) for positions in self.positions], dim=1)
        return tuple(
            WideTokens(part[0], part[1], positions) for part, positions in zip(parts, self.positions, strict=True)
        )


@dataclass(frozen=True)
class ChunkMoves:
    """What a step of chunks moves, for all sequences at once. It is the same in all layers of a format and comes from
    the host in one piece: each has the host wait for all that the device has to do.

    Indices are int64, or slices where there is one sequence.

    Attributes:
        positions: see `WideBatch.positions`.
        held: of `WideBatch.tokens`, what was in the windows before the step.
        held_slots: windows of these, and `held_places` in them.
        held_places: see `held_slots`.
        new: of `WideBatch.tokens`, the step's own, in their order.
        stay: of `WideBatch.tokens`, what stays in the windows.
        stay_slots: windows where that goes, and `stay_places` in them.
        stay_places: see `stay_slots`.
        leaving: of `WideBatch.tokens`, what is coded.
        leaving_sequence: which of the batch these are of.
        leaving_position: of these.
    """

    positions: tuple[Tensor, ...]
    held: slice | Tensor
    held_slots: Tensor
    held_places: Tensor
    new: slice | Tensor
    stay: Tensor
    stay_slots: Tensor
    stay_places: Tensor
    leaving: slice | Tensor
    leaving_sequence: Tensor
    leaving_position: Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, fmt: KVFormat, device: torch.device) -> ChunkMoves:
        """Of a step, once."""
        key = cls, fmt
        if key not in inputs.kept:
            inputs.kept[key] = cls._of(inputs, fmt, device)
        moves: ChunkMoves = inputs.kept[key]
        return moves

    @classmethod
    def _of(cls, inputs: AttentionInputs, fmt: KVFormat, device: torch.device) -> ChunkMoves:
        count = 0
        parts: list[tuple[Tensor, ...]] = []
        for number, step in enumerate(inputs.sequences):
            move = _window_moves(step.context_len, step.length, fmt, torch.device("cpu"))
            row, held = torch.arange(count, count + len(move.positions)), len(move.held_slots)
            stay, leaving = row[held + move.stay_rows], _leaving(step, fmt)
            parts.append(
                (
                    *(move.positions, row[:held], torch.full((held,), step.window_slot), move.held_slots, row[held:]),
                    *(stay, torch.full((len(stay),), step.window_slot), move.stay_slots),
                    *(row[leaving], torch.full((len(row[leaving]),), number), move.positions[leaving]),
                )
            )
            count += len(row)
        kinds = [torch.cat(kind) for kind in zip(*parts, strict=True)]
        positions, *moved = torch.cat(kinds).to(device).split([len(kind) for kind in kinds])
        moves = cls(positions.split([len(part[0]) for part in parts]), *moved)
        if len(parts) > 1:
            return moves
        return replace(moves, held=slice(0, held), new=slice(held, count), leaving=leaving)


def append_chunk(k: Tensor, v: Tensor, layer: PagedLayers, inputs: AttentionInputs) -> WideBatch:
    """Append a step of any number of tokens per sequence to one layer, in place.

    Afterwards `tokens_in_pages` tokens of every sequence are in its pages, which `block_table` must have room for.
    Sizes are read on the host, in the first layer of a step.

    Args:
        k: [tokens, num_kv_heads, head_dim], after q/k norm and RoPE.
        v: the same shape.
        layer: the layer.
        inputs: the batch.

    Returns:
        The tokens that the queries may read in 16 bit.
    """
    windows = layer.windows[0].permute(1, 0, 3, 2, 4)  # Sides, slots, places in the window, heads, channels.
    moves = ChunkMoves.of(inputs, layer.layout.format, k.device)
    tokens = k.new_empty(2, sum(map(len, moves.positions)), *k.shape[1:], dtype=layer.layout.wide_dtype)
    tokens[:, moves.held] = windows[:, moves.held_slots, moves.held_places]
    tokens[0, moves.new], tokens[1, moves.new] = k.type_as(tokens), v.type_as(tokens)
    windows[:, moves.stay_slots, moves.stay_places] = tokens[:, moves.stay]
    if len(moves.leaving_position):
        encode_tokens(layer, tokens[:, moves.leaving], moves.leaving_position, inputs, moves.leaving_sequence)
    return WideBatch(tokens, moves.positions)


def _leaving(step: SequenceStep, fmt: KVFormat) -> slice:
    """What a step codes, as a part of the positions of its `WideTokens`."""
    # Behind the sinks these begin with the first position that was read in 16 bit before the step.
    start = fmt.sinks - fmt.coded_tokens(step.context_len)
    return slice(start + tokens_in_pages(step.context_len, fmt), start + tokens_in_pages(step.length, fmt))
