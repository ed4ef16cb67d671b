"""Reference of `kv_append`: new tokens into the windows, leaving tokens into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.formats.codec import write_tokens
from subten.formats.spec import KVFormat
from subten.kernels.attention.inputs import AttentionInputs, LayerCache, SequenceStep, WideTokens


def append_reference(k: Tensor, v: Tensor, cache: LayerCache, inputs: AttentionInputs) -> tuple[WideTokens, ...]:
    """Append a step's keys and values to one layer's cache, in place.

    The tokens that leave the recent window are coded and stored in their pages before attention runs, so that
    under the `window` rule a query finds every token it must read through the codes.

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
    fmt = cache.layout.format
    coded_before, coded_after = fmt.coded_tokens(step.context_len), fmt.coded_tokens(step.length)
    old = _held_positions(step.context_len, coded_before, fmt, k.device)
    new = torch.arange(step.context_len, step.length, device=k.device)
    old_slots = _window_index(old, fmt)
    window = cache.windows[step.window_slot]
    wide = WideTokens(
        torch.cat([window[0][:, old_slots].transpose(0, 1), k]),
        torch.cat([window[1][:, old_slots].transpose(0, 1), v]),
        torch.cat([old, new]),
    )
    if coded_after > coded_before:
        # Behind the sinks, `wide` runs without gaps from the first uncoded position on.
        first = min(step.length, fmt.sinks)
        leaving = slice(first, first + coded_after - coded_before)
        write_tokens(
            cache.pages,
            wide.keys[leaving],
            wide.values[leaving],
            coded_before,
            cache.kept_channels,
            cache.layout,
            step.pages,
        )
    stay = new[(new < fmt.sinks) | (new >= fmt.sinks + coded_after)]
    slots, rows = _window_index(stay, fmt), stay - step.context_len
    window[0][:, slots] = k[rows].transpose(0, 1)
    window[1][:, slots] = v[rows].transpose(0, 1)
    return wide


def _held_positions(length: int, coded: int, fmt: KVFormat, device: torch.device) -> Tensor:
    """Positions in the windows of a sequence of `length` tokens: its sinks, then what is not coded."""
    sinks = torch.arange(min(length, fmt.sinks), device=device)
    return torch.cat([sinks, torch.arange(fmt.sinks + coded, max(length, fmt.sinks + coded), device=device)])


def _window_index(positions: Tensor, fmt: KVFormat) -> Tensor:
    ring = fmt.sinks + (positions - fmt.sinks) % max(1, fmt.ring_size)
    return torch.where(positions < fmt.sinks, positions, ring)
