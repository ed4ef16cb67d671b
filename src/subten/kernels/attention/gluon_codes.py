"""Pages of codes in the Gluon decode kernel: the loop in which nearly all of its time goes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated", no-warn-unreachable

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from subten.kernels.attention.gluon_layouts import (
    axis,
    axis_layout,
    blocks_layout,
    fragments_layout,
    grids_layout,
    half_values_layout,
    keys_layout,
    mma_layout,
    rotations_layout,
    scores_layout,
    turns_layout,
)
from subten.kernels.attention.gluon_parts import LOWEST, code_fragments, store_part
from subten.kernels.attention.gluon_ptx import (
    decayed,
    exp2,
    grid_offset,
    grid_scale,
    high_half,
    key_plane,
    low_half,
    prefetch,
    raised,
    small_float,
    transposed,
    value_plane,
)

_ROUNDS_AHEAD = gl.constexpr(4)
"""Pages per warp that are asked for before the first is read; at batch 1 that is all of them."""

# --- operands --------------------------------------------------------------------------------------------------


@gluon.jit
def _two_key_planes(words, PLANE: gl.constexpr, KA: gl.constexpr):
    """[warps, 64, 16] to an operand [warps, 64, 32]."""
    both = gl.permute(gl.join(key_plane(words, PLANE), key_plane(words, PLANE + 1)), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 64, 32]), KA, assert_trivial=True)


@gluon.jit
def _two_value_planes(words, PLANE: gl.constexpr, VA: gl.constexpr):
    """[warps, 8, 64] to an operand [warps, 16, 64]."""
    both = gl.permute(gl.join(value_plane(words, PLANE), value_plane(words, PLANE + 1)), [0, 3, 1, 2])
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 16, 64]), VA, assert_trivial=True)


@gluon.jit
def _by_row(x, R: gl.constexpr):
    """What belongs to token 8 r + x, [warps, r, x], to row 8 x + r of the scores."""
    return gl.convert_layout(gl.reshape(gl.permute(x, [0, 2, 1]), [x.shape[0], 64]), R, assert_trivial=True)


@gluon.jit
def _by_block(x, BL: gl.constexpr):
    """Rows [warps, 64] as [warps, 8, 8, 1]."""
    return gl.convert_layout(gl.reshape(x, [x.shape[0], 8, 8]), gl.SliceLayout(3, BL), assert_trivial=True)[
        :, :, :, None
    ]


@gluon.jit
def _at_pages(pointer, start, LAYOUT: gl.constexpr, RANK: gl.constexpr):
    """A pointer per warp, as the first axis of tensors in a layout."""
    x = gl.convert_layout(pointer + start, axis_layout(LAYOUT, RANK, 0), assert_trivial=True)
    for other in gl.static_range(1, RANK):
        x = gl.expand_dims(x, other)
    return x


@gluon.jit
def _decay_of_sums(first, second, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Decays of two tiles of heads, [warps, 8, 4] each, for sums [warps, ROWS, 8]."""
    W: gl.constexpr = first.shape[0]
    d = gl.reshape(gl.join(first, second), [W, 1, 8, 8]).broadcast_to([W, ROWS // 8, 8, 8])
    return gl.convert_layout(gl.reshape(d, [W, ROWS, 8]), MMA, assert_trivial=True)


# --- the mean key ----------------------------------------------------------------------------------------------


@gluon.jit
def _turns(q, mean_pairs, mean, head, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """q . (rotated mean) is a sum over rotary pairs of along * cos + across * sin of the pair's angle: both, over a
    unit, for eight pairs at a time [8 pairs, 8 columns], the pairs' numbers, and the unit.

    Odd columns are the second tile of heads, or the only one once more, for a second page.
    """
    HALF: gl.constexpr = SHAPE.head_dim // 2
    EIGHTS: gl.constexpr = SHAPE.mean_pairs // 8
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, turns_layout(WARPS)))
    column = axis(8, 1, 2, L)
    h = head + column // 2 + (4 * (column % 2) if SHAPE.tiles == 2 else 0)
    live = h < SHAPE.group
    # All of one kind are asked for before the first is used.
    pairs, halves, means = (), (), ()
    for e in gl.static_range(EIGHTS):
        pairs += (gl.load(mean_pairs + 8 * e + axis(8, 0, 2, L)),)
    for e in gl.static_range(EIGHTS):
        place = q + h * SHAPE.head_dim + pairs[e]
        halves += (gl.load(place, mask=live, other=0.0), gl.load(place + HALF, mask=live, other=0.0))
        place = mean + 8 * e + axis(8, 0, 2, L)
        means += (gl.load(place), gl.load(place + SHAPE.mean_pairs))
    largest = 0.0
    along, across = (), ()
    for e in gl.static_range(EIGHTS):
        q_0, q_1 = halves[2 * e].to(gl.float32), halves[2 * e + 1].to(gl.float32)
        along += (q_0 * means[2 * e] + q_1 * means[2 * e + 1],)
        across += (q_1 * means[2 * e] - q_0 * means[2 * e + 1],)
        largest = gl.maximum(largest, gl.max(gl.max(gl.maximum(gl.abs(along[e]), gl.abs(across[e])), 0), 0))
    unit = gl.maximum(largest, 1e-20) / 64.0
    normal_along, normal_across = (), ()
    for e in gl.static_range(EIGHTS):
        normal_along += ((along[e] / unit)[None],)
        normal_across += ((across[e] / unit)[None],)
    return normal_along, normal_across, pairs, unit


@gluon.jit
def _rotations(within, EIGHT: gl.constexpr, MA: gl.constexpr, WARPS: gl.constexpr):
    """Rotations within a page by eight pairs' angles, as they lie in memory, to an operand [warps, 64 tokens, 16]."""
    L: gl.constexpr = rotations_layout(WARPS)
    at = axis(4, 0, 4, L) * 256 + axis(8, 1, 4, L) * 32 + axis(4, 2, 4, L) * 8 + axis(8, 3, 4, L)
    x = gl.reshape(gl.load(within + at + 1024 * EIGHT), [4, 8, 4, 2, 2, 2])
    # tile, r, j, k half, row half, k low -> tile, row half, r, k half, j, k low
    x = gl.reshape(gl.permute(x, [0, 4, 1, 3, 2, 5]), [64, 16])
    x = gl.convert_layout(x, gl.SliceLayout(0, MA), assert_trivial=True)
    return x[None].broadcast_to([WARPS, 64, 16])


@gluon.jit
def _page_turns(pairs, starts, page, second_page, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """cos and sin at the first token of a page per warp, [warps, 8 pairs, 8 columns, 2] for every eight pairs; of
    another page in the odd columns."""
    BOTH: gl.constexpr = turns_layout(WARPS)
    T: gl.constexpr = gl.SliceLayout(3, BOTH)
    first = gl.convert_layout(page, axis_layout(T, 3, 0), assert_trivial=True)[:, None, None]
    other = gl.convert_layout(second_page, axis_layout(T, 3, 0), assert_trivial=True)[:, None, None]
    first = gl.where(axis(8, 2, 3, T) % 2 == 0, first, other) * (SHAPE.head_dim // 2)
    turns = ()
    for e in gl.static_range(SHAPE.mean_pairs // 8):
        at = starts + 2 * (first + pairs[e][None])
        turns += (gl.load(at[:, :, :, None] + axis(2, 3, 4, BOTH)),)
    return turns


@gluon.jit
def _removed(along, across, turns, within, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Scores of the mean key at the tokens of a page per warp, over the unit: [warps, 64, 8]; of another page in the
    odd columns.

    An angle is one up to the page's first token, which turns (along, across) once per page, and one within the page,
    the same for all pages.
    """
    MMA: gl.constexpr = mma_layout(WARPS)
    MA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    MB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    removed = gl.full([WARPS, 64, 8], 0.0, gl.float32, layout=MMA)
    for e in gl.static_range(SHAPE.mean_pairs // 8):
        cos, sin = gl.split(turns[e])
        turned = gl.permute(gl.join(along[e] * cos + across[e] * sin, across[e] * cos - along[e] * sin), [0, 3, 1, 2])
        turned = gl.convert_layout(gl.reshape(turned, [WARPS, 16, 8]), MB, assert_trivial=True)
        upper, rotations = turned.to(gl.float16), _rotations(within, e, MA, WARPS)
        removed = mma_v2(rotations, upper, removed)
        if SHAPE.tiles == 2:
            removed = mma_v2(rotations, (turned - upper.to(gl.float32)).to(gl.float16), removed)
    return removed


# --- the loop --------------------------------------------------------------------------------------------------


@gluon.jit
def ask_for_pages(records, page_stride, table, first_page, end_page, SHAPE: gl.constexpr, WARPS: gl.constexpr):
    """Have the pages of the loop's first rounds brought into the L2 cache; later ones it asks for itself."""
    warp = gl.arange(0, WARPS, layout=axis_layout(grids_layout(WARPS), 3, 0))
    for index in gl.static_range(_ROUNDS_AHEAD):
        number = gl.load(table + gl.minimum(first_page + index * WARPS + warp, end_page - 1))
        prefetch(records + number.to(gl.int64) * (8 * page_stride), SHAPE.record_bytes)


@gluon.jit
def attend_codes(
    q,
    steps,
    numbers,
    records,
    page_stride,
    table,
    first_page,
    end_page,
    first_token,
    end_token,
    head,
    scale,
    mean_pairs,
    mean,
    within,
    starts,
    stats,
    sums,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGES: gl.constexpr,
):
    """Pages `first_page` to `end_page`, PAGES per warp at a time; of the coded tokens in them, `first_token` to
    `end_token` are seen. Pointers are those of this program's sequence and heads, `page_stride` counts 16 bytes."""
    D: gl.constexpr = SHAPE.head_dim
    WORDS: gl.constexpr = D // 8
    TILES: gl.constexpr = SHAPE.tiles
    MMA: gl.constexpr = mma_layout(WARPS)
    KA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 if D == 64 else 8)
    QB: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 if D == 64 else 8)
    VA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SC: gl.constexpr = scores_layout(WARPS, 64)
    BL: gl.constexpr = blocks_layout(WARPS, 8)
    GR: gl.constexpr = grids_layout(WARPS)
    KEYS: gl.constexpr = keys_layout(WARPS, D // 4)
    VALUES: gl.constexpr = half_values_layout(WARPS) if D == 64 else VA
    R: gl.constexpr = gl.SliceLayout(2, SC)
    H: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SC))
    L3: gl.constexpr = gl.SliceLayout(1, BL)
    RECORD: gl.constexpr = SHAPE.record_bytes

    # --- queries
    SIZE: gl.constexpr = max(32, D // 4)
    OPERANDS: gl.constexpr = 2 if D == 64 else 4
    units, offsets, first_kept, second_kept, operands = (), (), (), (), ()
    column, heads = axis(8, 1, 2, gl.SliceLayout(0, QB)), gl.arange(0, 4, layout=H)
    for t in gl.static_range(TILES):
        # Heads that fill up a tile are zero: their memory is never written, and all heads of a warp raise their
        # maxima together.
        for i in gl.static_range(OPERANDS):
            live = head + 4 * t + column // 2 < SHAPE.group
            place = steps + (t * 8 * D + i * (8 * SIZE)) + column * SIZE + axis(SIZE, 0, 2, gl.SliceLayout(0, QB))
            operands += (gl.load(place, mask=live, other=0)[None].broadcast_to([WARPS, SIZE, 8]),)
        live = head + 4 * t + heads < SHAPE.group
        of_head = numbers + (4 * t + heads) * 4
        units += (gl.load(of_head, mask=live, other=0.0) * scale,)
        offsets += (gl.load(of_head + 1, mask=live, other=0.0) * scale,)
        first_kept += (gl.load(of_head + 2, mask=live, other=0.0) * scale,)
        second_kept += (gl.load(of_head + 3, mask=live, other=0.0) * scale,)
    if SHAPE.mean_pairs:
        along, across, pairs, mean_unit = _turns(q, mean_pairs, mean, head, SHAPE, WARPS)
        mean_unit = mean_unit * scale

    # --- sums
    highest, lengths, zeros, acc = (), (), (), ()
    for _t in gl.static_range(TILES):
        highest += (gl.full([WARPS, 8, 4], LOWEST, gl.float32, layout=L3),)
        lengths += (gl.full([WARPS, 8, 4], 0.0, gl.float32, layout=L3),)
        zeros += (gl.full([WARPS, 8, 4], 0.0, gl.float32, layout=L3),)
    ROWS: gl.constexpr = max(16, WORDS)
    FOURS: gl.constexpr = D // ROWS // 4
    for _i in gl.static_range(4 * FOURS):
        acc += (gl.full([WARPS, ROWS, 8], 0.0, gl.float32, layout=MMA),)

    # --- places
    warp = gl.arange(0, WARPS, layout=axis_layout(GR, 3, 0))
    bytes_of = records.to(gl.pointer_type(gl.int8), bitcast=True)
    pairs_of = records.to(gl.pointer_type(gl.int32), bitcast=True)
    token_r, token_x = axis(8, 1, 3, GR) * 8, axis(8, 2, 3, GR)
    # Added one after the other, what differs between the loads of a thread stays a constant in their addresses.
    key_x, key_r, key_byte = axis(8, 1, 4, KEYS) * (2 * D), axis(8, 2, 4, KEYS) * (D // 4), axis(D // 4, 3, 4, KEYS)
    value_word, value_slot = axis(WORDS, 1, 3, VALUES) * 64, axis(64, 2, 3, VALUES)

    numbers_now, numbers_next = (), ()
    for index in gl.static_range(PAGES):
        numbers_now += (gl.load(table + gl.minimum(first_page + index * WARPS + warp, end_page - 1)),)
        numbers_next += (gl.load(table + gl.minimum(first_page + (PAGES + index) * WARPS + warp, end_page - 1)),)
    for page in range(first_page, end_page, PAGES * WARPS):
        key_words, key_grids, kept_pairs, value_words, value_grids = (), (), (), (), ()
        if SHAPE.mean_pairs and TILES == 1:
            own = gl.minimum(page + warp, end_page - 1)
            other = gl.minimum(page + (PAGES - 1) * WARPS + warp, end_page - 1)
            turns = _page_turns(pairs, starts, own, other, SHAPE, WARPS)
        for index in gl.static_range(PAGES):
            start = numbers_now[index].to(gl.int64) * page_stride
            words = gl.load(_at_pages(bytes_of, 16 * start, KEYS, 4) + key_r + key_byte + key_x)
            words = gl.reshape(words, [WARPS, 64, D // 4])
            key_words += (words if D == 64 else gl.convert_layout(words, KA),)
            key_grids += (gl.load(_at_pages(records, 8 * start, GR, 3) + SHAPE.key_scale + token_r + token_x),)
            kept_pairs += (gl.load(_at_pages(pairs_of, 4 * start, GR, 3) + SHAPE.kept // 2 + token_r + token_x),)
            of_values = _at_pages(records, 8 * start, VALUES, 3) + SHAPE.value_codes + value_word + value_slot
            value_words += (gl.load(of_values),)
            value_grids += (gl.load(_at_pages(records, 8 * start, GR, 3) + SHAPE.value_scale + token_r + token_x),)
        numbers_now, numbers_next = numbers_next, ()
        for index in gl.static_range(PAGES):
            later = gl.minimum(page + (2 * PAGES + index) * WARPS + warp, end_page - 1)
            numbers_next += (gl.load(table + later),)
        if SHAPE.mean_pairs and TILES == 1:
            removed = gl.split(gl.reshape(_removed(along, across, turns, within, SHAPE, WARPS), [WARPS, 64, 4, 2]))

        for index in gl.static_range(PAGES):
            of_page = page + index * WARPS
            # --- scores
            kept = _by_row(kept_pairs[index], R)
            kept_0, kept_1 = low_half(kept), high_half(kept)
            key_scale = _by_row(grid_scale(key_grids[index]), R).to(gl.float32)
            key_offset = _by_row(grid_offset(key_grids[index]), R).to(gl.float32)
            if SHAPE.mean_pairs and TILES == 2:
                own = gl.minimum(of_page + warp, end_page - 1)
                turns = _page_turns(pairs, starts, own, own, SHAPE, WARPS)
                removed = gl.split(
                    gl.reshape(_removed(along, across, turns, within, SHAPE, WARPS), [WARPS, 64, 4, 2])
                )
            scores = ()
            for t in gl.static_range(TILES):
                s = gl.full([WARPS, 64, 8], 0, gl.int32, layout=MMA)
                for i in gl.static_range(OPERANDS):
                    planes = (
                        _two_key_planes(key_words[index], 2 * i, KA) if D == 64 else key_plane(key_words[index], i)
                    )
                    s = mma_v2(planes, operands[OPERANDS * t + i], s)
                upper, lower = gl.split(gl.reshape(s, [WARPS, 64, 4, 2]))
                x = small_float(gl.convert_layout(upper * 128 + lower, SC, assert_trivial=True))
                x = x * units[t][None, None, :] + key_offset[:, :, None] * offsets[t][None, None, :]
                x = x * key_scale[:, :, None]
                x += kept_0[:, :, None] * first_kept[t][None, None, :]
                x += kept_1[:, :, None] * second_kept[t][None, None, :]
                if SHAPE.mean_pairs:
                    x += gl.convert_layout(removed[t if TILES == 2 else index], SC, assert_trivial=True) * mean_unit
                scores += (gl.convert_layout(gl.reshape(x, [WARPS, 8, 8, 4]), BL, assert_trivial=True),)

            value_grid = value_grids[index]
            if (of_page + WARPS) * 64 > end_token or of_page * 64 < first_token:
                n = (of_page + warp)[:, None, None] * 64 + token_r + token_x
                seen = (n < end_token) & (n >= first_token)
                # What was never written may be NaN, but not as a packed grid of zero.
                value_grid = gl.where(seen, value_grid, 0)
                seen = gl.permute(seen.to(gl.int32), [0, 2, 1])
                seen = gl.convert_layout(seen, gl.SliceLayout(3, BL), assert_trivial=True)[:, :, :, None] != 0
                hidden = ()
                for t in gl.static_range(TILES):
                    hidden += (gl.where(seen, scores[t], float("-inf")),)
                scores = hidden

            # --- weights
            value_scale = _by_block(_by_row(grid_scale(value_grid), R).to(gl.float32), BL)
            value_offset = _by_block(_by_row(grid_offset(value_grid), R).to(gl.float32), BL)
            old_highest, old_lengths, old_zeros = highest, lengths, zeros
            highest, lengths, zeros, decays, weights = (), (), (), (), ()
            for t in gl.static_range(TILES):
                most, decay = raised(gl.max(scores[t], 1), old_highest[t])
                p = exp2(scores[t] - most[:, None])
                scaled = p * value_scale
                highest += (most,)
                lengths += (old_lengths[t] * decay + gl.sum(p, 1),)
                zeros += (old_zeros[t] * decay + gl.sum(scaled * value_offset, 1),)
                decays += (decay,)
                weights += (scaled.to(gl.float16),)
            second = gl.full_like(weights[0], 0.0) if TILES == 1 else weights[1]
            both = gl.join(weights[0], second)
            both = gl.convert_layout(
                gl.reshape(both, [WARPS, 8, 8, 8]), fragments_layout(WARPS, 8), assert_trivial=True
            )
            both = gl.reshape(gl.permute(transposed(both), [0, 1, 3, 2]), [WARPS, 64, 8])
            both = gl.convert_layout(both, PB, assert_trivial=True)

            # --- values
            decay = _decay_of_sums(decays[0], decays[TILES - 1], ROWS, MMA)
            old, acc = acc, ()
            for i in gl.static_range(FOURS):
                four = decayed((old[4 * i], old[4 * i + 1], old[4 * i + 2], old[4 * i + 3]), decay)
                for j in gl.static_range(4):
                    if D == 64:
                        planes = _two_value_planes(value_words[index], 2 * (4 * i + j), VA)
                    else:
                        planes = value_plane(value_words[index], 4 * i + j)
                    acc += (mma_v2(planes, both, four[j]),)
        for index in gl.static_range(PAGES):
            prefetch(records + numbers_next[index].to(gl.int64) * (8 * page_stride), RECORD)

    for t in gl.static_range(TILES):
        x = code_fragments(acc, t, SHAPE, WARPS)
        # Offsets were counted in eighths of a scale.
        store_part(highest[t], lengths[t], gl.sum(zeros[t], 1) * 0.125, x, t, True, stats, sums, SHAPE, WARPS)
