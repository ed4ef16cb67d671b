"""What eight warps multiply: gate and up of a run, slice by slice, then down, rows by rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from subten.kernels.gluon_names import reinterpret
from subten.kernels.moe.gluon_plan import WARPS
from subten.kernels.moe.gluon_scales import block_of, in_twos, row_of_scales, row_scales, stage_block_scales
from subten.kernels.moe.gluon_stream import full_stage, give_back, rows_at
from subten.kernels.moe.inputs import SCALE_BLOCK

_WARPS = gl.constexpr(WARPS)
_SCALE_BLOCK = gl.constexpr(SCALE_BLOCK)
UNIT = gl.constexpr(2.0**-27)
"""Of the sums: what a slice adds is rounded to 4e-9 at most."""
_LARGEST_SHARE = gl.constexpr(2.0**18)
"""What a slice may add to an output; 2^18 of these fit. A token with larger ones becomes NaN, not something wrong."""
_LIMB_BITS = gl.constexpr(23)
"""A share up to the largest is, in units, `high * 2^23 + low`, both of at most 2^22."""
_LIMB = gl.constexpr(2.0**23)
_ROUNDER = gl.constexpr(1.5 * 2.0**23)
"""A float32 of at most 2^22 that this is added to becomes the nearest whole number, in the lower bits of the sum."""
_ROUNDER_BITS = gl.constexpr(0x4B400000)
_INFINITY = gl.constexpr(0x7F800000)


@gluon.constexpr_function
def operand_of(word):
    """The type that is multiplied, of weights of this one."""
    return gl.float16 if word.primitive_bitwidth == 8 else word


@gluon.constexpr_function
def terms_of(operand):
    """In how many terms the intermediate is multiplied. Rounding to 8 bits of mantissa would be most of the error:
    the rest is multiplied as well."""
    return 2 if operand.is_bf16() else 1


@gluon.constexpr_function
def product_layout():
    """Of a product with down, and of a slice of gate or up: [neuron or row, token]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_WARPS.value, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def _pair_layout():
    """Of products with a pair of tiles of gate or up: [tile, neuron, token]. Four warps have 16 neurons each, of both
    tiles, or eight of one."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_WARPS.value // 4, 4, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _operand_layout(number, product, word):
    """Of the first or second operand of a product with weights of this type."""
    return gl.DotOperandLayout(number, product, 32 // word.primitive_bitwidth)


@gluon.constexpr_function
def _tile_layout(word, line, rank):
    """Of tiles in shared memory whose lines have so many elements, as the copy engine leaves them."""
    bits = word.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=line * bits // 8, element_bitwidth=bits, rank=rank)


@gluon.jit
def multiply_run(
    run, turn, pipe, staged, scales, of_blocks, block_scales, kept, columns, share, outputs, SHAPE: gl.constexpr,
    TUNING: gl.constexpr, FIXED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """All products of a run, up to what they add to the sums of its tokens.

    Args:
        run: of the shared expert or not, its expert, its first slice, and how many it has.
        turn: pairs of tiles that the program has taken before.
        pipe: from which they come.
        staged: tokens in shared memory, see gluon_tokens.py.
        scales: of the run, see `scales_of_run`.
        of_blocks: what `load_block_scales` has loaded.
        block_scales: room for it in shared memory.
        kept: room for what goes from gate and up to down, see `_gate_up_of_run`.
        columns: which tokens they are of, and whether there is one.
        share: of the expert in the outputs of these tokens.
        outputs: sums of all tokens in memory, and marks of those that become NaN.

    Returns:
        `turn` behind the run.
    """
    # A token is lost if something of it is infinite or NaN.
    lost = _not_finite(share)
    stage_block_scales(block_scales, of_blocks)
    turn, lost = _gate_up_of_run(
        run, turn, pipe, staged, scales, block_scales, share, lost, kept, SHAPE, TUNING, FIXED, ACTIVATION
    )
    return _down_of_run(run, turn, pipe, kept, scales, block_scales, columns, lost, outputs, SHAPE, TUNING, FIXED)


@gluon.jit
def _not_finite(values):
    """1 where a float32 is infinite or NaN, else 0."""
    return ((values.to(gl.int32, bitcast=True) & _INFINITY) == _INFINITY).to(gl.int32)


@gluon.jit
def _gate_up_of_run(
    run, turn, pipe, staged, scales, block_scales, share, lost, kept, SHAPE: gl.constexpr, TUNING: gl.constexpr,
    FIXED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Gate, up and activation of a run, slice by slice.

    They are `kept` for down: inner [slices * terms, neuron, token], rounded, and the factors that products with it
    are to have, [slices, token], which are the tokens' shares for all that inner was divided by.

    Returns:
        `turn` behind the run, and for each token 1 if it was lost before or inner is not finite, else 0.
    """
    inners, units = kept
    OPERAND: gl.constexpr = staged.dtype
    TERMS: gl.constexpr = terms_of(OPERAND)
    for number in range(run[3]):
        gate, up, turn = _gate_up_of_slice(run, number, turn, pipe, staged, scales, block_scales, SHAPE, TUNING)
        inner = ACTIVATION(gate, up)
        # Brought to at most two, lest it overflow in 16 bit.
        largest = gl.max(inner.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        lost |= (largest >= _INFINITY).to(gl.int32)
        unit = _power_of_two(largest)
        inner *= (1 / unit)[None, :]
        rounded = inner.to(OPERAND)
        inners.index(number * TERMS).store(rounded)
        if TERMS == 2:
            inners.index(number * TERMS + 1).store((inner - rounded.to(gl.float32)).to(OPERAND))
        units.index(number).store(share * unit * (1 / UNIT if FIXED else 1.0))
    return turn, lost


@gluon.jit
def _gate_up_of_slice(
    run, number, turn, pipe, staged, scales, block_scales, SHAPE: gl.constexpr, TUNING: gl.constexpr
):  # fmt: skip
    """Of the `number`-th slice of a run: gate and up, [neuron, token], and `turn` behind it."""
    SLICE: gl.constexpr = TUNING.slice
    STEPS: gl.constexpr = staged.shape[0]
    STEP: gl.constexpr = staged.shape[2]
    COLUMNS: gl.constexpr = staged.shape[3]
    WORD: gl.constexpr = pipe[0].dtype
    OPERAND: gl.constexpr = staged.dtype
    PAIR: gl.constexpr = _pair_layout()
    LEFT: gl.constexpr = _operand_layout(0, PAIR, WORD)
    RIGHT: gl.constexpr = _operand_layout(1, PAIR, WORD)
    TILES: gl.constexpr = _tile_layout(WORD, STEP, 3)
    gates = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
    ups = gl.zeros([2, SLICE, COLUMNS], gl.float32, layout=PAIR)
    if SHAPE.scales == "block":
        of_pairs = in_twos(block_scales[0])
        first_pair = block_of(run, number, TUNING) * (row_of_scales(SHAPE) // 2)
    elif SHAPE.scales == "channel":
        neuron = gl.arange(0, SLICE, layout=gl.SliceLayout(1, product_layout()))
        of_gate = scales[0] + run[2] * SLICE + number * SLICE + neuron
        gate_scale, up_scale = gl.load(of_gate)[:, None], gl.load(of_gate + scales[2])[:, None]
    for step in range(STEPS):
        stage, place = full_stage(turn, pipe, TUNING)
        tiles = reinterpret(stage, WORD, [2, 2, SLICE, STEP], TILES)
        gate_rows = tiles.index(0).load(LEFT)
        up_rows = tiles.index(1).load(LEFT)
        give_back(place, pipe)
        tokens = staged.index(step).load(RIGHT)
        if SHAPE.scales == "block":
            of_step = (first_pair + step) * 2
            gates = _add_scaled(gates, gate_rows, tokens, of_pairs.index(of_step))
            ups = _add_scaled(ups, up_rows, tokens, of_pairs.index(of_step + 1))
        else:
            gates = mma_v2(_wide(gate_rows, OPERAND), tokens, gates)
            ups = mma_v2(_wide(up_rows, OPERAND), tokens, ups)
        turn += 1
    gate = gl.convert_layout(gl.sum(gates, 0), product_layout())
    up = gl.convert_layout(gl.sum(ups, 0), product_layout())
    if SHAPE.scales == "channel":
        gate *= gate_scale
        up *= up_scale
    return gate, up, turn


@gluon.jit
def _down_of_run(
    run, turn, pipe, kept, scales, block_scales, columns, lost, outputs, SHAPE: gl.constexpr, TUNING: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """Down of a run, added to the sums of its tokens in memory; tokens that are lost are marked instead.

    Returns:
        `turn` behind the run.
    """
    token, real = columns
    sums, broken = outputs
    # A stage has two tiles of them.
    ROWS: gl.constexpr = pipe[0].shape[1] * pipe[0].shape[2] // (2 * TUNING.slice)
    STEPS: gl.constexpr = SHAPE.hidden // (2 * ROWS)
    COLUMNS: gl.constexpr = TUNING.columns
    ACC: gl.constexpr = product_layout()
    summed = real & (lost == 0) if FIXED else real
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    places = sums + token[None, :] * SHAPE.hidden + row[:, None]
    peak = gl.zeros([16 * _WARPS, COLUMNS], gl.float32, layout=ACC)
    row_scale = row_scales(scales, run[2], row, SHAPE)
    for number in range(STEPS):
        step = rows_at(number, run[2], STEPS)
        totals, peak, turn = _down_of_rows(
            run, step, turn, pipe, kept, row_scale, block_scales, peak, SHAPE, TUNING, FIXED
        )
        row_scale = row_scales(scales, step + 1, row, SHAPE)
        for i in gl.static_range(2):
            _add(places + (2 * step + i) * ROWS, totals[i], summed)
    if FIXED:
        lost |= (gl.max(peak, 0) > _LARGEST_SHARE / UNIT).to(gl.int32)
        gl.atomic_max(broken + token, lost, mask=real & (lost != 0), sem="relaxed")
    return turn


@gluon.jit
def _down_of_rows(
    run, step, turn, pipe, kept, row_scale, block_scales, peak, SHAPE: gl.constexpr, TUNING: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """Of two tiles of rows, all slices of a run: two sums [row, token], the largest magnitudes that were added so
    far, and `turn` behind them."""
    inners, units = kept
    WORD: gl.constexpr = pipe[0].dtype
    TERMS: gl.constexpr = terms_of(inners.dtype)
    ROWS: gl.constexpr = pipe[0].shape[1] * pipe[0].shape[2] // (2 * TUNING.slice)
    COLUMNS: gl.constexpr = TUNING.columns
    ACC: gl.constexpr = product_layout()
    LEFT: gl.constexpr = _operand_layout(0, ACC, WORD)
    RIGHT: gl.constexpr = _operand_layout(1, ACC, WORD)
    TILES: gl.constexpr = _tile_layout(WORD, TUNING.slice, 2)
    if SHAPE.scales == "block":
        of_tiles = in_twos(block_scales[1])
    nothing = gl.zeros([ROWS, COLUMNS], gl.int32 if FIXED else gl.float32, layout=ACC)
    added = ((nothing, nothing), (nothing, nothing)) if FIXED else (nothing, nothing)
    for number in range(run[3]):
        block = block_of(run, number, TUNING)
        inner = ()
        for term in gl.static_range(TERMS):
            inner += (inners.index(number * TERMS + term).load(RIGHT),)
        stage, place = full_stage(turn, pipe, TUNING)
        tiles = reinterpret(stage, WORD, [2, ROWS, TUNING.slice], TILES)
        rows = ()
        for i in gl.static_range(2):
            rows += (tiles.index(i).load(LEFT),)
        give_back(place, pipe)
        turn += 1
        more = ()
        for i in gl.static_range(2):
            product = _multiply(rows[i], inner)
            if SHAPE.scales == "block":
                of_tile = of_tiles.index(block * (row_of_scales(SHAPE) // 2) + step * 2 + i)
                product = _times_blocks(product, of_tile, units.index(number))
            else:
                product *= units.index(number).load(gl.SliceLayout(0, ACC))[None, :]
                if SHAPE.scales == "channel":
                    product *= row_scale[i][:, None]
            if FIXED:
                peak = gl.maximum(peak, _peak(product, peak))
                more += (_add_rounded(added[i], product),)
            else:
                more += (added[i] + product,)
        added = more
    if FIXED:
        added = (_whole(added[0], run[3]), _whole(added[1], run[3]))
    return added, peak, turn


@gluon.jit
def _add_rounded(limbs, values):
    """Add float32 numbers, rounded to whole ones, to sums in two limbs of int32, high and low.

    Conversions to 64 bits are instructions that a multiprocessor has few units for, and took up to a twentieth of the
    kernel's time. This has none: see `_ROUNDER`, whose bits are left in the sums.
    """
    high = values * (1 / _LIMB) + _ROUNDER
    low = values - (high - _ROUNDER) * _LIMB + _ROUNDER
    return limbs[0] + high.to(gl.int32, bitcast=True), limbs[1] + low.to(gl.int32, bitcast=True)


@gluon.jit
def _whole(limbs, count):
    """The int64 of such sums, of so many numbers."""
    high, low = limbs[0] - count * _ROUNDER_BITS, limbs[1] - count * _ROUNDER_BITS
    return (high.to(gl.int64) << _LIMB_BITS) + low.to(gl.int64)


@gluon.jit
def _wide(tile, operand):
    """Weights from shared memory as operand of the tensor core."""
    if tile.dtype == gl.uint8:
        return tile.to(gl.float8e4nv, bitcast=True).to(operand)
    else:
        return tile


@gluon.jit
def _add_scaled(total, rows, tokens, scales):
    """A step of the sums of gate or of up, those of both tiles, each with a scale in shared memory."""
    OF_TILE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout))
    product = mma_v2(_wide(rows, tokens.dtype), tokens, gl.zeros_like(total))
    return total + product * scales.load(OF_TILE)[:, None, None]


@gluon.jit
def _multiply(rows, inner):
    """The product of a tile of down; `inner` has one term or two."""
    ACC: gl.constexpr = rows.type.layout.parent
    ROWS: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = inner[0].shape[1]
    wide = _wide(rows, inner[0].dtype)
    product = gl.zeros([ROWS, COLUMNS], gl.float32, layout=ACC)
    for term in gl.static_range(len(inner)):
        product = mma_v2(wide, inner[term], product)
    return product


@gluon.jit
def _times_blocks(product, scales, units):
    """Times the scales of its blocks of rows and the factors of its columns, both in shared memory: one
    multiplication for each number, as the product of both factors is known once for a block."""
    ROWS: gl.constexpr = product.shape[0]
    COLUMNS: gl.constexpr = product.shape[1]
    blocks = product.reshape([ROWS // _SCALE_BLOCK, _SCALE_BLOCK, COLUMNS])
    OF_BLOCK: gl.constexpr = gl.SliceLayout(1, blocks.type.layout)
    scale = scales.load(gl.SliceLayout(1, OF_BLOCK))[:, None] * units.load(gl.SliceLayout(0, OF_BLOCK))[None, :]
    scaled = (blocks * scale[:, None, :]).reshape([ROWS, COLUMNS])
    return gl.convert_layout(scaled, product.type.layout, assert_trivial=True)


@gluon.jit
def _power_of_two(bits):
    """The largest one up to a float32 of these bits, within bounds that have an inverse."""
    power = (bits & _INFINITY).to(gl.float32, bitcast=True)
    return gl.minimum(gl.maximum(power, 2.0**-100), 2.0**100)


@gluon.jit
def _peak(product, like):
    """The largest magnitudes of every row that a thread has: [rows, columns] to the size of `like`."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    blocks = product.reshape([product.shape[0] // ROWS, ROWS, COLUMNS])
    return gl.convert_layout(gl.max(gl.abs(blocks), 0), like.type.layout, assert_trivial=True)


@gluon.jit
def _add(sums, values, wanted):
    """Add the columns that are wanted to sums in memory. As `gl.atomic_add`, but that the L2 is asked to keep the
    sums while weights go through it."""
    masks = gl.zeros_like(values).to(gl.int32) + wanted.to(gl.int32)[None, :]
    PREFIX: gl.constexpr = (
        "{ .reg .pred p; .reg .b64 kept; setp.ne.u32 p, $3, 0; createpolicy.fractional.L2::evict_last.b64 kept, 1.0;"
        " @p red.relaxed.gpu.global.add.L2::cache_hint."
    )
    if values.dtype == gl.int64:
        gl.inline_asm_elementwise(
            PREFIX + "u64 [$1], $2, kept; mov.b32 $0, 0; }", "=r,l,l,r", [sums.to(gl.int64), values, masks],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            PREFIX + "f32 [$1], $2, kept; mov.b32 $0, 0; }", "=r,l,f,r", [sums.to(gl.int64), values, masks],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
