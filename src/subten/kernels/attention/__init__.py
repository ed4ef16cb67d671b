"""Attention over the quantised cache: what it takes, its torch references, and (on a GPU) its device kernels."""

from subten.kernels.attention.inputs import AttentionInputs, LayerCache, MeanKey, PrefillRule, QKNorm, WideTokens
from subten.kernels.attention.paged import PagedAttention

__all__ = ["AttentionInputs", "LayerCache", "MeanKey", "PagedAttention", "PrefillRule", "QKNorm", "WideTokens"]
