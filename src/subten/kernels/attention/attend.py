"""Reference of the attention over a cache: queries over quantised pages and 16-bit windows, block by block.

At most `BLOCK_TOKENS` keys of one sequence and layer are decoded at a time; the history as a whole never exists
in 16 bit. The pages are read in the format's coded space: the query is rotated once, and the result is rotated
back once, before the windows are added.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from subten.formats.codec import decode_keys, decode_values
from subten.formats.spec import PAGE_SIZE, KVFormat
from subten.kernels.attention.inputs import (
    AttentionInputs,
    LayerCache,
    PrefillRule,
    SequenceStep,
    WideTokens,
    coded_until,
)
from subten.kernels.attention.online import BLOCK_TOKENS, OnlineSoftmax
from subten.kernels.precision import at_least_float32


def attend_reference(
    q: Tensor, wide: tuple[WideTokens, ...], cache: LayerCache, inputs: AttentionInputs, scale: float
) -> Tensor:
    """Attention of a step's queries over one layer's cache.

    Args:
        q: [tokens, num_heads, head_dim], after q/k norm and RoPE; head h reads KV head h // (num_heads /
            num_kv_heads).
        wide: what `append_reference` returned for this step.
        cache: the layer's cache, this step's tokens appended.
        inputs: the batch.
        scale: factor of q . k.

    Returns:
        [tokens, num_heads, head_dim] in q's dtype.
    """
    out = torch.zeros_like(q)
    for step, tokens in zip(inputs.sequences, wide, strict=True):
        if not step.absent:
            part = slice(step.start, step.end)
            out[part] = _attend_sequence(q[part], tokens, cache, inputs, step, scale)
    return out


def _attend_sequence(
    q: Tensor, wide: WideTokens, cache: LayerCache, inputs: AttentionInputs, step: SequenceStep, scale: float
) -> Tensor:
    fmt = cache.layout.format
    num_kv_heads = wide.keys.shape[1]
    group = q.shape[1] // num_kv_heads
    rows = rows_by_kv_head(q, num_kv_heads) * scale
    dtype = rows.dtype
    state = OnlineSoftmax(num_kv_heads, rows.shape[1], rows.shape[2], q.device, dtype)
    position, coded_end = _boundaries(step.context_len, step.length, fmt, inputs.rule, q.device)

    coded = int(coded_end[-1]) - fmt.sinks
    if coded > 0:
        kept_rows, coded_rows = _split_query(rows, cache)
        for first in range(0, coded, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, coded - first)
            page = first // PAGE_SIZE
            table = step.pages[page : page + -(-count // PAGE_SIZE)]
            records = cache.pages.index_select(0, table).transpose(0, 1)
            token = torch.arange(fmt.sinks + first, fmt.sinks + first + count, device=q.device)
            # The last page's unwritten tokens hold anything at all, NaN included: cut them off, don't mask them.
            keys = decode_keys(records, cache.layout)
            scores = coded_rows @ keys.coded[:, :count].to(dtype).transpose(-1, -2)
            if kept_rows.shape[-1]:
                scores = scores + kept_rows @ keys.kept[:, :count].to(dtype).transpose(-1, -2)
            if cache.mean_key is not None:
                scores = scores + rows @ cache.mean_key.at(token).permute(1, 2, 0).to(dtype)
            values = decode_values(records, cache.layout)[:, :count].to(dtype)
            state.add(scores, values, mask_rows(token < coded_end[:, None], group))
        if cache.coding.value is not None:
            state.output = state.output @ cache.coding.value.from_coded.to(dtype)

    keys_wide, values_wide = wide.keys.transpose(0, 1).to(dtype), wide.values.transpose(0, 1).to(dtype)
    for first in range(0, wide.positions.shape[0], BLOCK_TOKENS):
        part = slice(first, first + BLOCK_TOKENS)
        token = wide.positions[part]
        visible = (token <= position[:, None]) & ((token < fmt.sinks) | (token >= coded_end[:, None]))
        if visible.any():
            scores = rows @ keys_wide[:, part].transpose(-1, -2)
            state.add(scores, values_wide[:, part], mask_rows(visible, group))
    return rows_to_heads(state.result(), q)


@lru_cache(maxsize=1024)
def _boundaries(
    context_len: int, length: int, fmt: KVFormat, rule: PrefillRule, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of each query of a step its position, and where the positions end that it reads through the codes."""
    positions = range(context_len, length)
    ends = [coded_until(position, context_len, length, fmt, rule) for position in positions]
    return torch.tensor(positions, device=device), torch.tensor(ends, device=device)


def rows_by_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[tokens, num_heads, head_dim] to [num_kv_heads, group * tokens, head_dim], at least float32."""
    tokens, num_heads, head_dim = q.shape
    grouped = at_least_float32(q).view(tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)


def rows_to_heads(rows: Tensor, q: Tensor) -> Tensor:
    """Inverse of `rows_by_kv_head`, in q's shape and dtype."""
    num_kv_heads, _, head_dim = rows.shape
    grouped = rows.view(num_kv_heads, -1, q.shape[0], head_dim)
    return grouped.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def mask_rows(visible: Tensor, group: int) -> Tensor | None:
    """A mask [tokens, n] for the rows of `rows_by_kv_head`, or None where it hides nothing."""
    return None if bool(visible.all()) else visible.repeat(group, 1)


def _split_query(rows: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """A query's kept channels, and the query for the codes: zero there, then taken into coded space."""
    coding = cache.coding
    index = coding.kept_channels[:, None].expand(-1, rows.shape[1], -1)
    kept, rest = rows.gather(-1, index), rows.scatter(-1, index, 0.0)
    return kept, rest if coding.key is None else rest @ coding.key.from_coded.transpose(1, 2).to(rows.dtype)
