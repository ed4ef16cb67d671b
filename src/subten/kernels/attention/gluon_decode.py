"""Device kernel of `attend_decode` for `kv2` pages on sm_90, in Gluon: Triton with layouts by hand.

One launch, as in triton_decode.py, which serves all other formats and GPUs and is the one to read first: a program
takes some pages of one sequence and KV head (the first ones some of the 16-bit windows), and the last to arrive adds
up what all have found, in their order. What differs is how a warp works through a page;
docs/kernels/attention.md has the reasons and the measurements.

- q . k is a product of small integers. Codes are 0..3, or 0..12 where they stay two bits further up, four channels
  per byte of int8; the query is an integer of 15 bits in two halves, which are neighbouring columns of the tensor
  core's tile. `append_decode` leaves it so.
- p . v is a product of fp16 numbers, where codes are subnormal ones. P comes from the first product's result to the
  second's operand by transposing 8 x 8 fragments within the warp (movmatrix).
- Maxima are raised, and sums decay, only when that is needed to stay in range.
- Each warp asks for its next page, so that it is in the L2 cache when it gets there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from subten.errors import KernelUnavailableError
from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.gluon_codes import ask_for_pages, attend_codes
from subten.kernels.attention.gluon_parts import reduce_parts
from subten.kernels.attention.gluon_plan import GluonPlan, GluonShape, plan_gluon, why_not_gluon
from subten.kernels.attention.gluon_window import ask_for_window, attend_window
from subten.kernels.attention.inputs import AttentionInputs
from subten.kernels.attention.triton_append import DecodeQuery
from subten.kernels.gluon_names import barrier
from subten.kernels.gluon_overlap import let_next_kernel_start, wait_for_previous_kernel

_BYTES_PER_UNIT = 16
"""Pages are so many bytes apart, times the stride that the kernel is given: it fits an int32."""


@dataclass(frozen=True)
class GluonScratch:
    """Memory through which the programs of a launch pass results on; one serves all layers in turn, on one stream.

    Attributes:
        stats: float32 [batch, num_kv_heads * blocks of heads, parts, 2, heads], largest score (times log2 e) and sum
            of weights.
        sums: float32 [batch, num_kv_heads * blocks, parts, heads / 4, head_dim * 4], weighted sums of values, in the
            order of the tensor core's fragments.
        arrived: int32 [batch, num_kv_heads * blocks], programs that have left their results; zero between launches.
    """

    stats: Tensor
    sums: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, query: DecodeQuery, layer: PagedLayers, plan: GluonPlan) -> GluonScratch:
        """For such queries over `layer`, and over all layers of its format and shape."""
        (batch, num_heads, head_dim), num_kv_heads = query.q.shape, layer.pages.shape[2]
        shape = GluonShape.of(layer.layout, num_heads // num_kv_heads, mean_pairs=0)
        pairs, parts = num_kv_heads * shape.blocks, 2 * plan.splits
        return cls(
            query.q.new_empty(batch, pairs, parts, 2, 4 * shape.tiles, dtype=torch.float32),
            query.q.new_empty(batch, pairs, parts, shape.tiles, 4 * head_dim, dtype=torch.float32),
            query.q.new_zeros(batch, pairs, dtype=torch.int32),
        )


def attend_decode(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: GluonPlan | None = None,
    scratch: GluonScratch | None = None,
    *,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over one layer's cache.

    The host reads nothing back, so that a CUDA graph can capture the call.

    Args:
        query: what `append_decode` returned for this step, with `integer` asked for.
        layer: one layer, this step's tokens appended.
        inputs: the batch; the new token of each sequence is at position `context_len`. Of sequences with a negative
            `window_slot` (which fill up a batch) nothing is read, and the result is zero.
        scale: factor of q . k.
        plan: how the launch is split. By default, for sequences as long as the block table is wide.
        scratch: for this plan and these shapes. By default allocated, which is one more launch.
        sliding_window: tokens that a query sees, itself included; None means all.
        sink_logits: float32 [num_heads], the score of a key without a value that each head sees besides (learned
            attention sinks, as in gpt-oss); `scale` does not apply to it.

    Returns:
        [batch, num_heads, head_dim] in q's dtype.

    Raises:
        KernelUnavailableError: the kernel does not serve the format or head_dim.
    """
    reason = why_not_gluon(layer.layout)
    if reason is not None:
        raise KernelUnavailableError(reason)
    shape = _shape(query, layer, sliding_window)
    plan = plan or _default_plan(query, layer, inputs.block_table.shape[1], shape)
    scratch = scratch or GluonScratch.allocate(query, layer, plan)
    out = torch.empty_like(query.q, memory_format=torch.contiguous_format)
    arguments = decode_arguments(query, layer, inputs, scale, plan, scratch, shape, sink_logits, out)
    decode_kernel[(plan.splits, layer.pages.shape[2] * shape.blocks, len(query.q))](
        **arguments, num_warps=plan.tuning.warps, maxnreg=plan.tuning.registers, launch_pdl=plan.tuning.overlap
    )
    return out


def prepare_decode(
    query: DecodeQuery, layer: PagedLayers, max_pages: int, *, sliding_window: int | None = None
) -> tuple[GluonPlan, GluonScratch]:
    """Plan and scratch of `attend_decode`, for all steps and layers of these shapes and sequences of `max_pages`."""
    shape = _shape(query, layer, sliding_window)
    plan = _default_plan(query, layer, max_pages, shape)
    return plan, GluonScratch.allocate(query, layer, plan)


def _shape(query: DecodeQuery, layer: PagedLayers, sliding_window: int | None) -> GluonShape:
    assert layer.tables.gluon is not None
    group = query.q.shape[1] // layer.pages.shape[2]
    return GluonShape.of(layer.layout, group, layer.tables.gluon.num_mean_pairs, sliding_window)


def _default_plan(query: DecodeQuery, layer: PagedLayers, max_pages: int, shape: GluonShape) -> GluonPlan:
    device = query.q.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return plan_gluon(shape, len(query.q), layer.pages.shape[2], max_pages, num_sms)


DECODE = DecodeKernel(attend_decode, prepare_decode, integer_query=True)


def decode_arguments(
    query: DecodeQuery,
    layer: PagedLayers,
    inputs: AttentionInputs,
    scale: float,
    plan: GluonPlan,
    scratch: GluonScratch,
    shape: GluonShape,
    sink_logits: Tensor | None,
    out: Tensor,
) -> dict[str, Any]:
    """All arguments of `decode_kernel`; see `attend_decode`."""
    tables, pages, windows = layer.tables, layer.pages[0].view(torch.int16), layer.windows[0]
    gluon_tables = tables.gluon
    assert query.steps is not None
    assert query.numbers is not None
    assert gluon_tables is not None
    return {
        "q": query.q,
        "steps": query.steps,
        "numbers": query.numbers,
        "pages": pages,
        "windows": windows,
        "context_len": inputs.context_len,
        "block_table": inputs.block_table,
        "window_slot": inputs.window_slot,
        "mean_pairs": gluon_tables.mean_pairs,
        "mean": gluon_tables.mean,
        "within": gluon_tables.within,
        "starts": gluon_tables.starts,
        "output_matrix": gluon_tables.output_matrix,
        "output_scale": gluon_tables.output_scale,
        "sink_logits": sink_logits,
        "stats": scratch.stats,
        "sums": scratch.sums,
        "arrived": scratch.arrived,
        "out": out,
        "scale": scale * math.log2(math.e),
        "page_stride": pages.stride(0) * pages.itemsize // _BYTES_PER_UNIT,
        "record_stride": pages.stride(1),
        "window_stride": windows.stride(0),
        "values_stride": windows.stride(1),
        "window_head_stride": windows.stride(2),
        "table_stride": inputs.block_table.stride(0),
        "units_per_split": plan.units_per_split,
        "SHAPE": shape,
        "WARPS": plan.tuning.warps,
        "PAGES": plan.tuning.pages,
        "PARTS": plan.tuning.parts_per_warp(shape.head_dim),
    }


# --- the kernel --------------------------------------------------------------------------------------------------


@gluon.jit
def _extent(context_len, row, SHAPE: gl.constexpr):
    """What a sequence has to read: tokens, slots of the windows, coded tokens and their pages."""
    length = gl.load(context_len + row) + 1
    in_window = gl.minimum(length, SHAPE.sinks + SHAPE.ring)
    end_token = length - in_window
    first_token = 0
    if SHAPE.sliding_window is not None:
        first_token = gl.minimum(gl.maximum(length - SHAPE.sliding_window - SHAPE.sinks, 0), end_token)
    first_page = first_token // 64
    return length, in_window, first_token, end_token, first_page, gl.cdiv(end_token, 64) - first_page


@gluon.jit(do_not_specialize=["units_per_split"])
def decode_kernel(
    q,
    steps,
    numbers,
    pages,
    windows,
    context_len,
    block_table,
    window_slot,
    mean_pairs,
    mean,
    within,
    starts,
    output_matrix,
    output_scale,
    sink_logits,
    stats,
    sums,
    arrived,
    out,
    scale,
    page_stride,
    record_stride,
    window_stride,
    values_stride,
    window_head_stride,
    table_stride,
    units_per_split,
    SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Grid: (splits, num_kv_heads * blocks of heads, batch). The arguments are those of `decode_arguments`."""
    D: gl.constexpr = SHAPE.head_dim
    BLOCKS: gl.constexpr = (SHAPE.group + 7) // 8
    split, row = gl.program_id(0), gl.program_id(2)
    kv_head, block = gl.program_id(1) // BLOCKS, gl.program_id(1) % BLOCKS
    head = block * 8
    num_kv_heads = gl.num_programs(1) // BLOCKS
    pair = row * num_kv_heads + kv_head
    first_query = pair.to(gl.int64) * SHAPE.group
    splits = gl.num_programs(0)
    part = (gl.program_id(1) + row * gl.num_programs(1)).to(gl.int64) * (2 * splits)
    stats += part * (8 * SHAPE.tiles)
    sums += part * (SHAPE.tiles * 4 * D)
    slot = gl.load(window_slot + row).to(gl.int64)
    length, in_window, first_token, end_token, first_page, pages_of = _extent(context_len, row, SHAPE)
    # Sixteen slots of the windows are a unit of work as a page is one; they come first.
    wide = gl.cdiv(in_window, 16)
    units = wide + pages_of
    per_part = gl.cdiv(gl.maximum(gl.cdiv(units, splits), units_per_split), WARPS) * WARPS
    parts = gl.cdiv(units, per_part)
    first_unit = split * per_part
    begin, end = first_unit * 16, gl.minimum((first_unit + per_part) * 16, in_window)
    first = gl.maximum(first_unit - wide, 0)
    stop = gl.minimum(first_unit + per_part - wide, pages_of)
    keys = windows + slot * window_stride + kv_head * window_head_stride
    records = pages + kv_head.to(gl.int64) * record_stride
    table = block_table + row.to(gl.int64) * table_stride
    if slot >= 0:
        if begin < end:
            ask_for_window(keys, keys + values_stride, begin, end, SHAPE, WARPS)
        if first < stop:
            ask_for_pages(records, page_stride, table, first_page + first, first_page + stop, SHAPE, WARPS)
    wait_for_previous_kernel()
    let_next_kernel_start()
    works = False
    if slot >= 0:
        works = split < parts
        if begin < end:
            attend_window(
                q + first_query * D,
                keys,
                keys + values_stride,
                begin,
                end,
                length,
                head,
                scale,
                stats + split * (8 * SHAPE.tiles),
                sums + split * (SHAPE.tiles * 4 * D),
                SHAPE,
                WARPS,
            )
        if first < stop:
            attend_codes(
                q + first_query * D,
                steps + (pair.to(gl.int64) * BLOCKS + block) * (SHAPE.tiles * 8 * D),
                numbers + (pair.to(gl.int64) * BLOCKS + block) * (SHAPE.tiles * 16),
                records,
                page_stride,
                table,
                first_page + first,
                first_page + stop,
                first_token,
                gl.minimum(end_token, (first_page + stop) * 64),
                head,
                scale,
                mean_pairs + kv_head * SHAPE.mean_pairs if SHAPE.mean_pairs else mean_pairs,
                mean + kv_head * (2 * SHAPE.mean_pairs) if SHAPE.mean_pairs else mean,
                within + kv_head * (128 * SHAPE.mean_pairs) if SHAPE.mean_pairs else within,
                starts,
                stats + (splits + split) * (8 * SHAPE.tiles),
                sums + (splits + split) * (SHAPE.tiles * 4 * D),
                SHAPE,
                WARPS,
                PAGES,
            )
    elif split == 0:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        i = gl.arange(0, 8 * D, layout=L)
        gl.store(
            out + first_query * D + head * D + i,
            gl.zeros([8 * D], out.dtype.element_ty, layout=L),
            mask=i < (SHAPE.group - head) * D,
        )
    if works:
        barrier()
        ticket = gl.program_id(1) + row * gl.num_programs(1)
        if gl.atomic_add(arrived + ticket, 1, sem="acq_rel") == parts - 1:
            matrix = output_matrix
            factor = 1.0
            if output_matrix is not None:
                matrix = output_matrix + kv_head * (D * D)
                factor = gl.load(output_scale + kv_head)
            logits = sink_logits
            if sink_logits is not None:
                logits = sink_logits + kv_head * SHAPE.group
            reduce_parts(
                stats,
                sums,
                head,
                gl.cdiv(wide, per_part),
                splits + gl.where(pages_of > 0, wide // per_part, parts),
                splits + parts,
                matrix,
                factor,
                logits,
                out + first_query * D,
                SHAPE,
                WARPS,
                PARTS,
            )
            gl.store(arrived + ticket, 0)
