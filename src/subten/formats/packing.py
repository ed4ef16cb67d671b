"""Codes in int16 words, in the order that the decode kernel reads them.

A word holds 16 / bits channels. With W words per token, bits `p * bits ...` of word w belong to channel
`p * W + w` (plane p): one AND then isolates the same plane of two neighbouring words, which is what makes
dequantisation cheaper than one instruction per element. Token t of a page sits in slot
`(t % 8) * 8 + t // 8`, so that the eight scales one thread needs are neighbours in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subten.formats.spec import PAGE_SIZE

WORD_BITS = 16
_SIDE = 8
assert _SIDE * _SIDE == PAGE_SIZE


def words_per_token(head_dim: int, bits: int) -> int:
    """int16 words that hold one token's codes of one head."""
    return head_dim * bits // WORD_BITS


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., head_dim] below 2**bits to int16 words [..., head_dim * bits / 16]."""
    planes = WORD_BITS // bits
    by_plane = codes.unflatten(-1, (planes, codes.shape[-1] // planes)).to(torch.int32)
    shifts = torch.arange(planes, device=codes.device, dtype=torch.int32) * bits
    words = (by_plane << shifts[:, None]).sum(-2, dtype=torch.int32)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`: int16 words [..., W] to uint8 codes [..., W * 16 / bits]."""
    # The shift copies the sign bit downwards; the mask takes it away again.
    planes = [(words >> shift) & ((1 << bits) - 1) for shift in range(0, WORD_BITS, bits)]
    return torch.cat(planes, dim=-1).to(torch.uint8)


def slot_of_token(token: Tensor) -> Tensor:
    """Slot in a page's word planes of the page's token 0..63 (int64)."""
    return (token % _SIDE) * _SIDE + token // _SIDE


def in_token_order(slots: Tensor, dim: int) -> Tensor:
    """A page's slots as its tokens: the permutation of `slot_of_token` is the transposition of an 8 x 8 square,
    so this is a view until it is flattened.

    Args:
        slots: any dtype, 64 entries on axis `dim` (negative).

    Returns:
        The same shape with token t at index t of that axis.
    """
    square: Tensor = slots.unflatten(dim, (_SIDE, _SIDE))
    return square.transpose(dim - 1, dim).flatten(dim - 1, dim)
