"""Attention over the quantised cache: what it takes, its torch references, and (on a GPU) its device kernels."""

from subten.kernels.attention.inputs import (
    AttentionInputs,
    Heads,
    LayerCache,
    MeanKey,
    PrefillRule,
    QKNorm,
    WideTokens,
)
from subten.kernels.attention.paged import PagedAttention

__all__ = [
    "AttentionInputs",
    "Heads",
    "LayerCache",
    "MeanKey",
    "PagedAttention",
    "PrefillRule",
    "QKNorm",
    "WideTokens",
]
