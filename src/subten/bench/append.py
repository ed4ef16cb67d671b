"""What a decode step pays for appending: one launch per layer, and one for the codes of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from subten.bench.caches import BenchCache, NewTokens, build_cache, random_calibration
from subten.bench.checks import attempt, relative_error
from subten.bench.report import AppendRow
from subten.bench.shapes import Shape
from subten.bench.timing import REPLAYS, Call, Timer, time_calls
from subten.errors import NumericalError
from subten.formats import PAGE_SIZE, KVFormat, PageLayout
from subten.formats.codec import decode_keys, decode_values, reconstruct_keys, reconstruct_values, through_records
from subten.kernels.norm import rms_norm_reference
from subten.kernels.rope import rope_reference

LAYERS = 32
BATCHES = (1, 8, 32)
_CONTEXT = 1000
_EPS = 1e-6
_ALLOWED = 2e-2
"""Relative error of queries in fp16, and of keys and values in bf16 windows."""
_ALLOWED_CODES = 1e-1
"""Of what is read from the codes, against what is read from torch's: a few decisions hang by the order of a sum."""


def measure_append(
    fmt: KVFormat,
    shape: Shape,
    device: torch.device,
    replays: int = REPLAYS,
    timer: Timer = time_calls,
) -> AppendRow:
    """Check and time `append_decode` and `encode_leaving` at one batch."""
    layout = PageLayout(fmt, shape.head_dim)

    def measure() -> tuple[float, float, float]:
        calibration = random_calibration(fmt, shape, _CONTEXT + PAGE_SIZE, device)
        cache = build_cache(layout, shape.kv_heads, [_CONTEXT] * shape.batch, LAYERS, calibration)
        appends, encode, error = checked_calls(cache, NewTokens.random(shape, device))
        return timer(appends, replays).us, timer([encode], replays).us, error

    found, reason = attempt(measure)
    append_us, encode_us, error = found or (None, None, None)
    return _row(fmt, shape, append_us, encode_us, error, reason)


def _row(
    fmt: KVFormat,
    shape: Shape,
    append_us: float | None,
    encode_us: float | None,
    error: float | None,
    note: str | None,
) -> AppendRow:
    us = None if append_us is None or encode_us is None else append_us + encode_us / LAYERS
    heads = shape.batch, shape.kv_heads, shape.group, shape.head_dim
    return AppendRow(*heads, fmt.name, LAYERS, us, append_us, encode_us, error, note)


def checked_calls(cache: BenchCache, tokens: NewTokens) -> tuple[Sequence[Call], Call, float]:
    """The call of each layer, the call for all, and the largest relative error against torch, over one layer.

    Raises:
        NumericalError: that is too large.
    """
    from subten.kernels.attention.inputs import QKNorm
    from subten.kernels.attention.triton_append import append_decode
    from subten.kernels.attention.triton_encode import encode_leaving

    head_dim = cache.layers.layout.head_dim
    q_weight, k_weight = (1 + 0.1 * torch.randn(2, head_dim, device=tokens.q.device)).to(tokens.q.dtype)
    norm, rope, inputs = QKNorm(q_weight, k_weight, _EPS), cache.calibration.rope, cache.inputs
    appends = [
        partial(append_decode, tokens.q, tokens.k, tokens.v, cache.layers.layer(index), inputs, norm=norm, rope=rope)
        for index in range(cache.num_layers)
    ]
    encode = partial(encode_leaving, cache.layers, inputs)

    query = appends[0]()
    encode()
    expected_q, expected_k = rope_reference(
        rms_norm_reference(tokens.q, q_weight, _EPS),
        rms_norm_reference(tokens.k, k_weight, _EPS),
        *rope.at(inputs.context_len.long()),
    )
    fmt = cache.layers.layout.format
    context_len = int(inputs.context_len[0])
    slot = fmt.sinks + (context_len - fmt.sinks) % fmt.ring_size
    stored = cache.layers.windows[0, :, :, :, slot].transpose(0, 1)
    errors = [
        (relative_error(query.q, expected_q), _ALLOWED),
        (relative_error(stored[0], expected_k), _ALLOWED),
        (relative_error(stored[1], tokens.v), _ALLOWED),
        (_code_error(cache, context_len + 1 - fmt.recent), _ALLOWED_CODES),
    ]
    for error, allowed in errors:
        if not error <= allowed:
            raise NumericalError(f"relative error {error:.1e} against torch; {allowed:.0e} is allowed")
    return appends, encode, max(error for error, _ in errors)


def _code_error(cache: BenchCache, position: int) -> float:
    """Of the token at one position of every sequence, read through its codes in the first layer."""
    layout, coding = cache.layers.layout, cache.calibration.coding
    fmt, windows = layout.format, cache.layers.windows[0]
    slot = fmt.sinks + (position - fmt.sinks) % fmt.ring_size
    keys, values = windows[:, :, :, slot].float().transpose(0, 1)
    mean_key = cache.calibration.mean_key
    if mean_key is not None:
        keys = keys - mean_key.at(torch.full((len(keys),), position, device=keys.device))
    expected = through_records(keys, values, coding, layout)

    page, token = divmod(position - fmt.sinks, PAGE_SIZE)
    records = cache.layers.pages[0, cache.inputs.block_table[:, page].long()].transpose(0, 1)
    read = (
        reconstruct_keys(decode_keys(records, layout), coding, layout),
        reconstruct_values(decode_values(records, layout), coding),
    )
    mine = (tensor[:, token::PAGE_SIZE].transpose(0, 1) for tensor in read)
    return max(relative_error(a, b) for a, b in zip(mine, expected, strict=True))
