"""Reference of `dense_attention`: causal attention of each sequence over its own tokens, without a cache."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from subten.kernels.attention.attend import mask_rows, rows_by_kv_head, rows_to_heads
from subten.kernels.attention.online import BLOCK_TOKENS, OnlineSoftmax


def dense_attention_reference(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    """Causal attention over a ragged batch, each sequence from its first token on.

    It reads keys in the same blocks as the paged reference, so that a cache which loses nothing gives the same
    result bit for bit.

    Args:
        q: [tokens, num_heads, head_dim].
        k: [tokens, num_kv_heads, head_dim].
        v: the same shape as k.
        query_start: int32 [batch + 1], offsets of the sequences on the token axis.
        scale: factor of q . k.

    Returns:
        [tokens, num_heads, head_dim] in q's dtype.
    """
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for start, end in pairwise(starts):
        rows = rows_by_kv_head(q[start:end], k.shape[1]) * scale
        state = OnlineSoftmax(k.shape[1], rows.shape[1], rows.shape[2], q.device, rows.dtype)
        keys = k[start:end].transpose(0, 1).to(rows.dtype)
        values = v[start:end].transpose(0, 1).to(rows.dtype)
        position = torch.arange(end - start, device=q.device)
        for first in range(0, end - start, BLOCK_TOKENS):
            part = slice(first, first + BLOCK_TOKENS)
            visible = mask_rows(position[part] <= position[:, None], q.shape[1] // k.shape[1])
            state.add(rows @ keys[:, part].transpose(-1, -2), values[:, part], visible)
        out[start:end] = rows_to_heads(state.result(), q[start:end])
    return out
