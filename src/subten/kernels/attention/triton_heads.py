"""Heads of queries and keys after the norm and the rotation that are still to be done: for kernels that need them,
and for the tokens of chunks, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subten.kernels.attention.inputs import QKNorm
from subten.kernels.rope import RopeTable

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ROWS = 16
"""Tokens of a program."""
WARPS = 4


def norm_and_rotate_rows(
    q: Tensor, k: Tensor, positions: Tensor, norm: QKNorm | None, rope: RopeTable | None
) -> tuple[Tensor, Tensor]:
    """As `norm_and_rotate`, in one launch; what a row becomes depends on nothing else.

    Args:
        q: [tokens, num_heads, head_dim] of any floating dtype up to 32 bits; the last axis is contiguous.
        k: [tokens, num_kv_heads, head_dim] of the same dtype; likewise.
        positions: int64 [tokens].
        norm: of q and k, or None.
        rope: to rotate them by their positions after that, or None.

    Returns:
        q and k; contiguous where something was to be done.
    """
    if (norm is None and rope is None) or not len(q):
        return q, k
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    grid = triton.cdiv(len(q), _ROWS), q.shape[1] + k.shape[1]
    arguments = heads_arguments(q, k, q_out, k_out, positions, norm, rope)
    heads_kernel[grid](**arguments, num_warps=WARPS, enable_fp_fusion=False)
    return q_out, k_out


def heads_arguments(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    positions: Tensor,
    norm: QKNorm | None,
    rope: RopeTable | None,
) -> dict[str, Any]:
    """All arguments of `heads_kernel`."""
    return {
        "q": q,
        "k": k,
        "q_out": q_out,
        "k_out": k_out,
        "positions": positions,
        "q_weight": norm and norm.q_weight,
        "k_weight": norm and norm.k_weight,
        "cos": rope and rope.cos,
        "sin": rope and rope.sin,
        "eps": norm.eps if norm else 0.0,
        "tokens": len(q),
        "q_row": q.stride(0),
        "q_head": q.stride(1),
        "k_row": k.stride(0),
        "k_head": k.stride(1),
        "NUM_HEADS": q.shape[1],
        "NUM_KV_HEADS": k.shape[1],
        "HEAD_DIM": q.shape[2],
        "PADDED": triton.next_power_of_2(q.shape[2]),
        "ROWS": _ROWS,
    }


@triton.jit(do_not_specialize=["tokens"])
def heads_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of ROWS tokens. Grid: (blocks of tokens, heads of queries, then those of keys). The arguments are
    those of `heads_arguments`."""
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = token < tokens
    position = tl.load(positions + token, mask=live, other=0)
    if head < NUM_HEADS:
        first, second = heads(
            q + token * q_row + head * q_head, live, position, q_weight, cos, sin, eps, HEAD_DIM, PADDED
        )
        _store(q_out + (token * NUM_HEADS + head) * HEAD_DIM, first, second, live, HEAD_DIM, PADDED)
    else:
        head -= NUM_HEADS
        first, second = heads(
            k + token * k_row + head * k_head, live, position, k_weight, cos, sin, eps, HEAD_DIM, PADDED
        )
        _store(k_out + (token * NUM_KV_HEADS + head) * HEAD_DIM, first, second, live, HEAD_DIM, PADDED)


@triton.jit
def _store(out, first, second, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED // 2)[None, :]
    inside = live & (channel < HEAD_DIM // 2)
    tl.store(out + channel, rounded(first, out.dtype.element_ty), mask=inside)
    tl.store(out + HEAD_DIM // 2 + channel, rounded(second, out.dtype.element_ty), mask=inside)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 to `dtype`, to nearest: by hand where it is Triton's interpreter that would cut bfloat16 off."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(x == x, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def heads(x, live, position, weight, cos, sin, eps, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Heads at `x` [n, 1] after norm and RoPE, float32, rounded to their dtype as often as torch does. Channels that
    RoPE turns together lie in one thread: the first half and the second, [n, PADDED // 2] each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, PADDED // 2)[None, :]
    inside = live & (channel < HALF)
    first = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + channel + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        # Of every head, as a tile: then they come in the layout of the heads.
        place = tl.broadcast_to(weight + channel, first.shape)
        first_weight = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        cosine = tl.load(cos + position * HALF + channel, mask=inside, other=0.0)
        sine = tl.load(sin + position * HALF + channel, mask=inside, other=0.0)
    if weight is not None:
        square = tl.sum(first * first + second * second, 1, keep_dims=True)
        factor = tl.rsqrt(square * (1 / HEAD_DIM) + eps)
        first = rounded(first * factor * first_weight, x.dtype.element_ty).to(tl.float32)
        second = rounded(second * factor * second_weight, x.dtype.element_ty).to(tl.float32)
    if cos is not None:
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = rounded(turned, x.dtype.element_ty).to(tl.float32)
        second = rounded(second, x.dtype.element_ty).to(tl.float32)
    return first, second
