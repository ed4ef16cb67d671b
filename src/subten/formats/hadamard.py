"""The orthonormal Hadamard transform over head_dim, block-diagonal where head_dim is no power of two."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_block(head_dim: int) -> int:
    """Size of the Hadamard blocks: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Sylvester-ordered Walsh-Hadamard transform of the last axis, scaled to be orthonormal.

    It is symmetric, hence its own inverse. A head of 96 channels is transformed as three blocks of 32.

    Args:
        x: floating point, [..., head_dim].

    Returns:
        The same shape and dtype.
    """
    head_dim = x.shape[-1]
    block = hadamard_block(head_dim)
    blocks = x.reshape(*x.shape[:-1], head_dim // block, block)
    return (blocks @ _matrix(block, x.dtype, x.device)).flatten(-2)


_MATRICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (size, dtype, device)
    if key not in _MATRICES:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        _MATRICES[key] = (matrix / math.sqrt(size)).to(dtype=dtype, device=device)
    return _MATRICES[key]
