"""Softmax over keys that arrive in blocks (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867; the form used by FlashAttention, arXiv:2205.14135)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 512
"""Keys read at a time: bounds the memory of the reference, whatever the context."""

_LOWEST = -1e30  # finite, so that a row which has seen no key yet does not become NaN


class OnlineSoftmax:
    """Running softmax-weighted sum of values for `rows` queries of each KV head, in `dtype` throughout."""

    def __init__(self, num_kv_heads: int, rows: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        self.highest = torch.full((num_kv_heads, rows, 1), _LOWEST, device=device, dtype=dtype)
        self.total = torch.zeros((num_kv_heads, rows, 1), device=device, dtype=dtype)
        self.output = torch.zeros((num_kv_heads, rows, head_dim), device=device, dtype=dtype)

    def add(self, scores: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Take in one block.

        Args:
            scores: [num_kv_heads, rows, n], scaled.
            values: [num_kv_heads, n, head_dim].
            visible: bool [rows, n], or None where every query sees every key.
        """
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        highest = torch.maximum(self.highest, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - highest)
        decay = torch.exp(self.highest - highest)
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self.output = self.output * decay + weights @ values
        self.highest = highest

    def result(self) -> Tensor:
        """The attention output, [num_kv_heads, rows, head_dim]."""
        return self.output / self.total
