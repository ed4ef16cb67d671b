"""Reference of the append: new tokens into the windows, leaving tokens into their pages."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from subten.formats.codec import write_tokens
from subten.formats.spec import PAGE_SIZE, KVFormat
from subten.kernels.attention.inputs import AttentionInputs, LayerCache, SequenceStep, WideTokens


def append_reference(k: Tensor, v: Tensor, cache: LayerCache, inputs: AttentionInputs) -> tuple[WideTokens, ...]:
    """Append a step's keys and values to one layer's cache, in place.

    The tokens that leave the recent window have been coded and stored in their pages before attention runs, so
    that under the `window` rule a query finds every token it must read through the codes.

    Args:
        k: [tokens, num_kv_heads, head_dim], after q/k norm and RoPE.
        v: the same shape.
        cache: the layer's cache.
        inputs: the batch.

    Returns:
        Per sequence, the tokens that its queries may read in 16 bit.
    """
    wide = cache.layout.wide_dtype
    return tuple(
        _append_sequence(k[s.start : s.end].to(wide), v[s.start : s.end].to(wide), cache, s) for s in inputs.sequences
    )


def _append_sequence(k: Tensor, v: Tensor, cache: LayerCache, step: SequenceStep) -> WideTokens:
    if step.absent:
        return WideTokens(k[:0], v[:0], torch.zeros(0, dtype=torch.int64, device=k.device))
    moves = _window_moves(step.context_len, step.length, cache.layout.format, k.device)
    window_k, window_v = cache.windows[step.window_slot]
    wide = WideTokens(
        torch.cat([window_k[:, moves.held_slots].transpose(0, 1), k]),
        torch.cat([window_v[:, moves.held_slots].transpose(0, 1), v]),
        moves.positions,
    )
    if moves.coded.stop > moves.coded.start:
        keys = wide.keys[moves.coded]
        if cache.mean_key is not None:
            keys = keys.float() - cache.mean_key.at(wide.positions[moves.coded])
        write_tokens(
            cache.pages,
            keys,
            wide.values[moves.coded],
            moves.first,
            cache.coding,
            cache.layout,
            step.pages,
        )
    window_k[:, moves.stay_slots] = k[moves.stay_rows].transpose(0, 1)
    window_v[:, moves.stay_slots] = v[moves.stay_rows].transpose(0, 1)
    return wide


CODED_AT_ONCE = 32
"""Tokens are coded in groups of this many, ahead of the step in which the first of them leaves the window: the cost
of a shaped rounding on a CPU is one of small operations, not of arithmetic. What is coded ahead is not read ahead,
and it never needs a page that is not there, as the group divides the page."""
assert PAGE_SIZE % CODED_AT_ONCE == 0


def _tokens_in_pages(length: int, fmt: KVFormat) -> int:
    """Tokens whose codes are in the pages once `length` tokens were appended; at least `fmt.coded_tokens`."""
    coded = fmt.coded_tokens(length)
    if fmt.granularity > 1:
        return coded
    return min(-(-coded // CODED_AT_ONCE) * CODED_AT_ONCE, max(0, length - fmt.sinks))


class _WindowMoves(NamedTuple):
    """What a step moves in and out of one sequence's windows; the same in every layer.

    Attributes:
        held_slots: window slots of what was held before the step: the sinks, then what is not coded.
        positions: positions of these tokens and of the new ones behind them.
        coded: the part of `positions` that is coded in this step.
        first: number of the first of these among the sequence's coded tokens.
        stay_rows: new tokens that stay in the windows.
        stay_slots: the slots they go to.
    """

    held_slots: Tensor
    positions: Tensor
    coded: slice
    first: int
    stay_rows: Tensor
    stay_slots: Tensor


@lru_cache(maxsize=1024)
def _window_moves(context_len: int, length: int, fmt: KVFormat, device: torch.device) -> _WindowMoves:
    before, after = fmt.coded_tokens(context_len), fmt.coded_tokens(length)
    first, end = _tokens_in_pages(context_len, fmt), _tokens_in_pages(length, fmt)
    sinks = torch.arange(min(context_len, fmt.sinks), device=device)
    uncoded = torch.arange(fmt.sinks + before, max(context_len, fmt.sinks + before), device=device)
    held = torch.cat([sinks, uncoded])
    new = torch.arange(context_len, length, device=device)
    stay = new[(new < fmt.sinks) | (new >= fmt.sinks + after)]
    return _WindowMoves(
        held_slots=_window_slot(held, fmt),
        positions=torch.cat([held, new]),
        # Behind the sinks, `positions` runs without gaps from the first uncoded one on.
        coded=slice(fmt.sinks + first - before, fmt.sinks + end - before),
        first=first,
        stay_rows=stay - context_len,
        stay_slots=_window_slot(stay, fmt),
    )


def _window_slot(positions: Tensor, fmt: KVFormat) -> Tensor:
    ring = fmt.sinks + (positions - fmt.sinks) % max(1, fmt.ring_size)
    return torch.where(positions < fmt.sinks, positions, ring)
