"""A mixture of experts for 1 to 64 tokens in one launch: Triton, for NVIDIA GPUs from sm_80 on.

An item of work is a slice of one expert's neurons, for up to so many of its tokens as a tile of the tensor core has
columns. A program looks at the router's logits, works out which tokens visit which expert, and takes items in turn:
it multiplies the slice's rows of gate and up with the tokens, applies the activation, keeps what came of it as
operand of the second product, multiplies with the slice's columns of down, and adds the result to the tokens' sums.
Tokens stay where they are and are read by their number, which is worked out in registers; no index and no
intermediate goes through global memory. Weights lie along the rows of a tile, tokens along columns. Where an expert
has more tokens than a tile has columns, the items of one slice follow each other: its weights come from memory once,
and then from the L2.

Sums are integers of 64 bits in units of 2^-32, so that they do not depend on the order in which programs add to them:
a token's result has the same bits whatever else is in the batch, and whatever happens to run first. The last programs
to arrive turn them into the output and clear them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.kernels.moe.gluon_plan import GluonMoEPlan
from subten.kernels.moe.inputs import SCALE_BLOCK, MoEWeights
from subten.kernels.moe.plan import MoEPlan, MoEShape, plan_moe
from subten.kernels.moe.reference import router_logits

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_LOG2_E = tl.constexpr(math.log2(math.e))
_E4M3_MAX = tl.constexpr(448.0)
_SECOND_TERM = tl.constexpr(16.0)
"""The rest of what rounding to e4m3 leaves is at most 2^-4 of it."""

_UNIT = tl.constexpr(2.0**-32)
"""Of the sums: a token whose outputs are as small as 1e-3 still gets them to 2e-7."""
_LARGEST_SHARE = tl.constexpr(2.0**18)
"""What a slice may add to an output; 2^13 of these fit. A token with larger ones becomes NaN, not something wrong."""

_NO_KEY = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class MoEScratch:
    """Memory through which programs pass results on; one serves all layers in turn, on one stream. All of it is zero
    between launches.

    Attributes:
        sums: int64 or float32 [tokens, hidden].
        broken: int32 [tokens], whether a token has to become NaN.
        counters: int32 [2], programs that have arrived, and that have left.
    """

    sums: Tensor
    broken: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, plan: MoEPlan | GluonMoEPlan, hidden: int, device: torch.device) -> MoEScratch:
        """For launches of this plan."""
        dtype = torch.int64 if plan.sums == "fixed" else torch.float32
        return cls(
            torch.zeros(plan.tokens, hidden, dtype=dtype, device=device),
            torch.zeros(plan.tokens, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, of float32."""
    return gate / (1 + tl.exp2(gate * -_LOG2_E)) * up


def moe_decode(
    x: Tensor,
    weights: MoEWeights,
    plan: MoEPlan | None = None,
    scratch: MoEScratch | None = None,
    *,
    logits: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
    activation: Any = swiglu,
) -> Tensor:
    """Mix the experts of up to 64 tokens, `x` [tokens, hidden] in 16 bit; returns the same shape and dtype.

    The host reads nothing back, so that a CUDA graph can capture the call. With FP8 weights, tokens are multiplied in
    fp16 or FP8: an element beyond 65504 becomes infinite. A token with a NaN or an infinity anywhere is NaN as a
    whole in the end (with sums in float32, where it reaches); others don't notice.

    Args:
        x: tokens, rows of contiguous elements.
        weights: that `plan.refusal` has no objection to; slices of the down projection in memory, where it is cut,
            are a multiple of those of the plan.
        plan: how the launch is split; by default, for as many tokens as there are.
        scratch: for this plan or one with as many tokens; by default allocated and cleared, a few launches more.
        logits: of the router [tokens, num_experts], and in one more column that of the shared expert's gate where it
            has one. By default computed here, in the precision of `router`.
        residual: [tokens, hidden], contiguous, what the result is added to.
        factor: of the result before that.
        out: [tokens, hidden], contiguous, where to leave the result: that is of its dtype then.
        activation: from gate and up in float32 to what down is given; a Triton function.
    """
    shape = MoEShape.of(weights)
    if not len(x):
        return torch.empty_like(x)
    plan = plan or plan_moe(shape, len(x), multiprocessors(x.device))
    scratch = scratch or MoEScratch.allocate(plan, shape.hidden, x.device)
    out = torch.empty(len(x), shape.hidden, dtype=x.dtype, device=x.device) if out is None else out
    logits = router_logits(x, weights) if logits is None else logits
    tuning = plan.tuning
    moe_kernel[(plan.programs,)](
        **decode_arguments(x, logits, weights, plan, scratch, out, activation, residual, factor),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
    )
    return out


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of a CPU, as the interpreter has it, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode_arguments(
    x: Tensor,
    logits: Tensor,
    weights: MoEWeights,
    plan: MoEPlan | GluonMoEPlan,
    scratch: MoEScratch,
    out: Tensor,
    activation: Any = swiglu,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> dict[str, Any]:
    """All arguments of `moe_kernel`, see `moe_decode`."""
    shared, shape = weights.shared, MoEShape.of(weights)
    return {
        "x": x,
        "logits": logits,
        "correction": weights.correction,
        "gate_up": weights.gate_up,
        "gate_up_scale": weights.gate_up_scale,
        "down": weights.down,
        "down_scale": weights.down_scale,
        "shared_gate_up": shared and shared.gate_up,
        "shared_gate_up_scale": shared and shared.gate_up_scale,
        "shared_down": shared and shared.down,
        "shared_down_scale": shared and shared.down_scale,
        "sums": scratch.sums,
        "broken": scratch.broken,
        "counters": scratch.counters,
        "residual": residual,
        "out": out,
        "tokens": len(x),
        "x_stride": x.stride(0),
        "logits_stride": logits.stride(0),
        "factor": float(factor),
        "SHAPE": shape,
        "TUNING": plan.tuning,
        "TOKENS": plan.tokens,
        "FINISHERS": plan.finishers,
        "FIXED": plan.sums == "fixed",
        "GATED": shared is not None and shared.gate is not None,
        "ACTIVATION": activation,
    }


# --- routing -------------------------------------------------------------------------------------------------


@triton.jit
def _score(logit, SHAPE: tl.constexpr):
    """What experts are ranked by, but for a correction."""
    if SHAPE.scoring == "sigmoid":
        return 1 / (1 + tl.exp2(logit * -_LOG2_E))
    else:
        return logit


@triton.jit
def _rank_key(score):
    """int32 in the order of the scores, above `_NO_KEY`."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NO_KEY + 1)


@triton.jit
def _sum_of_experts(values, SHAPE: tl.constexpr):
    """Of [TOKENS, experts] the sums of rows, two and two: in an order that no layout of threads has a part in."""
    BITS: tl.constexpr = SHAPE.expert_bits
    for _ in tl.static_range(BITS):
        values = tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]), 2)
    return tl.reshape(values, [values.shape[0]])


@triton.jit
def _route(logits, correction, tokens, logits_stride, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Which experts every token visits, as bits of words [TOKENS, experts / 32], how many tokens every expert has
    [experts], and of every token its highest logit, and what its scores are divided by."""
    TOP_K: tl.constexpr = SHAPE.top_k
    token, expert = tl.arange(0, TOKENS), tl.arange(0, SHAPE.padded_experts)
    exists = expert < SHAPE.num_experts
    inside = (token < tokens)[:, None] & exists[None, :]
    # Four of 128 experts in each of 32 lanes: a maximum over all lanes of a warp is one instruction.
    column = tl.max_contiguous(expert, SHAPE.padded_experts // 32)
    logit = tl.load(logits + token[:, None] * logits_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    score = _score(logit, SHAPE)
    ranked = score
    if correction is not None:
        ranked += tl.load(correction + expert, mask=exists, other=0.0)[None, :]
    key = tl.where(exists[None, :], _rank_key(ranked), _NO_KEY)
    for _ in tl.static_range(TOP_K):
        highest = tl.max(key, 1)
        first = tl.min(tl.where(key == highest[:, None], expert[None, :], SHAPE.padded_experts), 1)
        key = tl.where(expert[None, :] == first[:, None], _NO_KEY, key)
    chosen = inside & (key == _NO_KEY)
    top = tl.max(tl.where(exists[None, :], logit, float("-inf")), 1)
    counted = chosen if SHAPE.renormalize else inside
    if SHAPE.scoring == "sigmoid":
        divisor = tl.full([TOKENS], 1.0, tl.float32)
        if SHAPE.renormalize:
            divisor = _sum_of_experts(tl.where(chosen, score, 0.0), SHAPE)
    else:
        divisor = _sum_of_experts(tl.where(counted, tl.exp2((logit - top[:, None]) * _LOG2_E), 0.0), SHAPE)
    divisor = tl.where(token < tokens, divisor, 1.0)
    words = tl.reshape(chosen.to(tl.int32) << (expert % 32)[None, :], [TOKENS, SHAPE.padded_experts // 32, 32])
    return tl.sum(words, 2), tl.sum(chosen.to(tl.int32), 0), top, divisor


@triton.jit
def _visits(words, expert, SHAPE: tl.constexpr):
    """Which tokens visit an expert."""
    word = tl.arange(0, SHAPE.padded_experts // 32)
    bits = tl.sum(tl.where((word == expert // 32)[None, :], words, 0), 1)
    return (bits >> (expert % 32)) & 1 != 0


@triton.jit
def _weight(logits, expert, token, real, logits_stride, top, divisor, SHAPE: tl.constexpr):
    """Of one expert for these tokens, of which `real` ones visit it."""
    logit = tl.load(logits + token * logits_stride + expert, mask=real, other=0.0).to(tl.float32)
    if SHAPE.scoring == "sigmoid":
        return _score(logit, SHAPE) / divisor * SHAPE.factor
    else:
        return tl.exp2((logit - top) * _LOG2_E) / divisor * SHAPE.factor


@triton.jit
def _of_columns(here, values):
    """For every column the value of the token that is `here` [columns, TOKENS], or zero where none is."""
    bits = tl.sum(tl.where(here, values.to(tl.int32, bitcast=True)[None, :], 0), 1)
    return bits.to(values.dtype, bitcast=True)


# --- products ------------------------------------------------------------------------------------------------


@triton.jit
def _in_fp8(values, TERMS: tl.constexpr):
    """Columns as e4m3 with a scale each: first term, second one (times `_SECOND_TERM`) if wanted, and the scales."""
    largest = tl.max(tl.abs(values), 0)
    scale = tl.where(largest > 0, largest / _E4M3_MAX, 1.0)
    scaled = values / scale[None, :]
    first = scaled.to(tl.float8e4nv)
    second = first
    if TERMS == 2:
        second = ((scaled - first.to(tl.float32)) * _SECOND_TERM).to(tl.float8e4nv)
    return first, second, scale


@triton.jit
def _multiply_fp8(weight, first, second, TERMS: tl.constexpr):
    product = tl.dot(weight, first)
    if TERMS == 2:
        product += tl.dot(weight, second) * (1 / _SECOND_TERM)
    return product


@triton.jit
def _gate_and_up(
    x, weight, scale, token, real, x_stride, first_neuron, WIDTH: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    SHAPE: tl.constexpr, TUNING: tl.constexpr,
):  # fmt: skip
    """Gate and up of one slice of an expert of this `WIDTH`, each [slice, columns] in float32, for tokens of these
    numbers where they are `real`.

    Rows of both lie together in one tile, in turns of eight: one stream of weights and one product serve both, and a
    thread holds a gate and its up.
    """
    SLICE: tl.constexpr = TUNING.slice
    HIDDEN: tl.constexpr = SHAPE.hidden
    STEP: tl.constexpr = TUNING.block_k
    TERMS: tl.constexpr = 2 if TUNING.activations == "fp8x2" else 1
    COLUMNS: tl.constexpr = TUNING.columns
    row, k = tl.arange(0, 2 * SLICE), tl.arange(0, STEP)
    neuron, half = first_neuron + row // 16 * 8 + row % 8, row // 8 % 2
    weights = weight + (half * WIDTH + neuron)[:, None] * HIDDEN + k[None, :]
    columns = x + token[None, :] * x_stride + k[:, None]
    block_scales = scale
    if SHAPE.scales == "block":
        block_scales = scale + (half * SCALE_BLOCKS + neuron // _SCALE_BLOCK) * SHAPE.hidden_blocks
    both = tl.zeros([2 * SLICE, COLUMNS], tl.float32)
    for start in tl.range(0, HIDDEN, STEP, num_stages=TUNING.stages):
        tile = tl.load(weights + start, eviction_policy="evict_first")
        values = tl.load(columns + start, mask=real[None, :], other=0.0)
        if TUNING.activations == "16bit":
            operand: tl.constexpr = tl.float16 if SHAPE.scales != "none" else weight.dtype.element_ty
            if SHAPE.scales == "block":
                product = tl.dot(tile.to(operand), values.to(operand))
                both += product * tl.load(block_scales + start // _SCALE_BLOCK)[:, None]
            else:
                both = tl.dot(tile.to(operand), values.to(operand), both)
        else:
            first, second, unit = _in_fp8(values.to(tl.float32), TERMS)
            product = _multiply_fp8(tile, first, second, TERMS)
            if SHAPE.scales == "block":
                both += product * (tl.load(block_scales + start // _SCALE_BLOCK)[:, None] * unit[None, :])
            else:
                both += product * unit[None, :]
    if SHAPE.scales == "channel":
        both *= tl.load(scale + half * WIDTH + neuron)[:, None]
    pairs = tl.permute(tl.reshape(both, [SLICE // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    return tl.reshape(gate, [SLICE, COLUMNS]), tl.reshape(up, [SLICE, COLUMNS])


@triton.jit
def _power_of_two(x):
    """The largest one up to x, within bounds that have an inverse."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power, 2.0**-100), 2.0**100)


@triton.jit
def _add_down(
    inner, share, token, real, weight, scale, first_neuron, sums, WIDTH: tl.constexpr, SHAPE: tl.constexpr,
    TUNING: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add `share` [columns] of the slice's columns of down times `inner` [slice, columns] to the sums of the `real`
    ones among these tokens; returns the largest magnitude per token that was added, in units of the sums."""
    SLICE: tl.constexpr = TUNING.slice
    HIDDEN: tl.constexpr = SHAPE.hidden
    COLUMNS: tl.constexpr = TUNING.columns
    STEP: tl.constexpr = TUNING.block_h
    CUT: tl.constexpr = WIDTH if SHAPE.cut is None else SHAPE.cut
    TERMS: tl.constexpr = 2 if TUNING.activations == "fp8x2" else 1
    row, column = tl.arange(0, STEP), tl.arange(0, SLICE)
    # Without the hint the compiler does not know that rows are aligned, and loads byte by byte.
    corner = tl.multiple_of(first_neuron // CUT * (HIDDEN * CUT) + first_neuron % CUT, SLICE)
    weights = weight + corner + row[:, None] * CUT + column[None, :]
    # Brought to at most two, lest it overflow in 16 bit.
    operand: tl.constexpr = tl.float16 if SHAPE.scales != "none" else weight.dtype.element_ty
    first, second = None, None
    if TUNING.activations == "16bit":
        unit = _power_of_two(tl.max(tl.abs(inner), 0))
        inner *= (1 / unit)[None, :]
        first = inner.to(operand)
        if operand == tl.bfloat16:
            # Rounding to 8 bits of mantissa would be most of the error: the rest is multiplied as well.
            second = (inner - first.to(tl.float32)).to(operand)
    else:
        first, second, unit = _in_fp8(inner, TERMS)
    share *= unit
    if FIXED:
        share *= 1 / _UNIT
    peak = tl.zeros([STEP, COLUMNS], tl.float32)
    outputs = sums + token[None, :] * HIDDEN + row[:, None]
    for start in tl.range(0, HIDDEN, STEP, num_stages=TUNING.stages):
        tile = tl.load(weights + start * CUT, eviction_policy="evict_first")
        if TUNING.activations == "16bit":
            product = tl.dot(tile.to(operand), first)
            if operand == tl.bfloat16:
                product = tl.dot(tile, second, product)
        else:
            product = _multiply_fp8(tile, first, second, TERMS)
        if SHAPE.scales == "channel":
            product *= tl.load(scale + start + row)[:, None]
        elif SHAPE.scales == "block":
            block = (start + row) // _SCALE_BLOCK * tl.cdiv(WIDTH, _SCALE_BLOCK) + first_neuron // _SCALE_BLOCK
            product *= tl.load(scale + block)[:, None]
        product *= share[None, :]
        if FIXED:
            peak = tl.maximum(peak, tl.abs(product))
            product = product.to(tl.int64)
        tl.atomic_add(outputs + start, product, mask=real[None, :], sem="relaxed")
    return tl.max(peak, 0)


# --- the launch ----------------------------------------------------------------------------------------------


@triton.jit
def _is_odd(x):
    """1 for NaN and infinity, or 0. By the exponent's bits: in `x - x` a product before it would become one fused
    multiply-add with the difference, and leave what rounding took off."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000 == 0x7F800000).to(tl.int32)


@triton.jit
def _slice_of_expert(
    x, weight, weight_scale, down, down_scale, share, token, real, first_neuron, x_stride, sums, broken,
    WIDTH: tl.constexpr, SCALE_BLOCKS: tl.constexpr, SHAPE: tl.constexpr, TUNING: tl.constexpr, FIXED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One item of work."""
    gate, up = _gate_and_up(
        x, weight, weight_scale, token, real, x_stride, first_neuron, WIDTH, SCALE_BLOCKS, SHAPE, TUNING
    )
    inner = ACTIVATION(gate, up)
    odd = tl.max(_is_odd(inner), 0) | _is_odd(share)
    summed = real & (odd == 0) if FIXED else real
    peak = _add_down(inner, share, token, summed, down, down_scale, first_neuron, sums, WIDTH, SHAPE, TUNING, FIXED)
    if FIXED:
        odd |= (peak > _LARGEST_SHARE / _UNIT).to(tl.int32)
        tl.atomic_max(broken + token, odd, mask=real & (odd != 0), sem="relaxed")


@triton.jit
def _finish(
    sums, broken, residual, out, tokens, factor, number, finishers, SHAPE: tl.constexpr, FIXED: tl.constexpr
):  # fmt: skip
    """Turn every `finishers`-th block of sums, from `number` on, into output, and clear it."""
    BLOCK: tl.constexpr = 512
    HIDDEN: tl.constexpr = SHAPE.hidden
    offset = tl.arange(0, BLOCK)
    for start in range(number * BLOCK, tokens * HIDDEN, finishers * BLOCK):
        at = start + offset
        inside = at < tokens * HIDDEN
        value = tl.load(sums + at, mask=inside, other=0, cache_modifier=".cg")
        if FIXED:
            lost = tl.load(broken + at // HIDDEN, mask=inside, other=0, cache_modifier=".cg")
            value = tl.where(lost != 0, float("nan"), value.to(tl.float32) * _UNIT)
        value *= factor
        if residual is not None:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    # A thread does not clear what it has read: the compiler gives each access a layout of its own. So all read first.
    tl.debug_barrier()
    for start in range(number * BLOCK, tokens * HIDDEN, finishers * BLOCK):
        at = start + offset
        tl.store(sums + at, tl.zeros([BLOCK], sums.dtype.element_ty), mask=at < tokens * HIDDEN)


@triton.jit(do_not_specialize=["tokens"])
def moe_kernel(
    x, logits, correction, gate_up, gate_up_scale, down, down_scale, shared_gate_up, shared_gate_up_scale,
    shared_down, shared_down_scale, sums, broken, counters, residual, out, tokens, x_stride, logits_stride, factor,
    SHAPE: tl.constexpr, TUNING: tl.constexpr, TOKENS: tl.constexpr, FINISHERS: tl.constexpr, FIXED: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. The shared expert's items come first, then those of visited experts."""
    SLICE: tl.constexpr = TUNING.slice
    COLUMNS: tl.constexpr = TUNING.columns
    SLICES: tl.constexpr = SHAPE.intermediate // SLICE
    SHARED_SLICES: tl.constexpr = SHAPE.shared // SLICE
    token, number, column = tl.arange(0, TOKENS), tl.arange(0, SHAPE.padded_experts), tl.arange(0, COLUMNS)
    words, visitors, top, divisor = _route(logits, correction, tokens, logits_stride, SHAPE, TOKENS)
    tiles = tl.cdiv(visitors, COLUMNS)
    first_tile = tl.cumsum(tiles, 0) - tiles
    shared_tiles = tl.cdiv(tokens, COLUMNS)
    shared_items = SHARED_SLICES * shared_tiles
    items = shared_items + tl.sum(tiles, 0) * SLICES
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < shared_items:
            if SHARED_SLICES > 0:
                of_column = item % shared_tiles * COLUMNS + column
                real = of_column < tokens
                share = tl.full([COLUMNS], 1.0, tl.float32)
                if GATED:
                    gate_logits = logits + of_column * logits_stride + SHAPE.num_experts
                    share = 1 / (1 + tl.exp2(tl.load(gate_logits, mask=real, other=0.0).to(tl.float32) * -_LOG2_E))
                _slice_of_expert(
                    x, shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale, share, of_column, real,
                    item // shared_tiles * SLICE, x_stride, sums, broken, SHAPE.shared, SHAPE.shared_scale_blocks,
                    SHAPE, TUNING, FIXED, ACTIVATION,
                )  # fmt: skip
        else:
            tile = (item - shared_items) // SLICES
            this = (first_tile <= tile) & (tile < first_tile + tiles)
            expert = tl.sum(tl.where(this, number, 0), 0)
            of_expert = item - shared_items - tl.sum(tl.where(this, first_tile, 0), 0) * SLICES
            tiles_of_expert = tl.sum(tl.where(this, tiles, 0), 0)
            visiting = _visits(words, expert, SHAPE).to(tl.int32)
            place = tl.cumsum(visiting, 0) - visiting - of_expert % tiles_of_expert * COLUMNS
            here = (visiting != 0)[None, :] & (place[None, :] == column[:, None])
            real = tl.max(here.to(tl.int32), 1) != 0
            of_column = _of_columns(here, token)
            divided_by = tl.where(real, _of_columns(here, divisor), 1.0)
            share = _weight(logits, expert, of_column, real, logits_stride, _of_columns(here, top), divided_by, SHAPE)
            expert = expert.to(tl.int64)
            gate_up_scales, down_scales = gate_up_scale, down_scale
            if SHAPE.scales == "channel":
                gate_up_scales = gate_up_scale + expert * (2 * SHAPE.intermediate)
                down_scales = down_scale + expert * SHAPE.hidden
            elif SHAPE.scales == "block":
                gate_up_scales = gate_up_scale + expert * (2 * SHAPE.scale_blocks * SHAPE.hidden_blocks)
                down_scales = down_scale + expert * (SHAPE.scale_blocks * SHAPE.hidden_blocks)
            _slice_of_expert(
                x, gate_up + expert * (2 * SHAPE.intermediate * SHAPE.hidden), gate_up_scales,
                down + expert * (SHAPE.intermediate * SHAPE.hidden), down_scales, share, of_column, real,
                of_expert // tiles_of_expert * SLICE, x_stride, sums, broken, SHAPE.intermediate,
                SHAPE.scale_blocks, SHAPE, TUNING, FIXED, ACTIVATION,
            )  # fmt: skip
    arriving = tl.minimum(items, tl.num_programs(0))
    if tl.program_id(0) < arriving:
        finishers = tl.minimum(arriving, FINISHERS)
        # All warps have added before the counter says so; that also acquires what others have added.
        tl.debug_barrier()
        ticket = tl.atomic_add(counters, 1, sem="acq_rel")
        if ticket >= arriving - finishers:
            if FINISHERS > 1:
                while tl.atomic_add(counters, 0, sem="acquire") < arriving:
                    pass
            finisher = ticket - (arriving - finishers)
            _finish(sums, broken, residual, out, tokens, factor, finisher, finishers, SHAPE, FIXED)
            tl.debug_barrier()
            if tl.atomic_add(counters + 1, 1, sem="acq_rel") == finishers - 1:
                tl.store(broken + token, tl.zeros([TOKENS], tl.int32))
                tl.store(counters, 0)
                tl.store(counters + 1, 0)
