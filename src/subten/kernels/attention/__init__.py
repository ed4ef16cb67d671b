"""Attention over the quantised cache: what it takes, its torch references, and (on a GPU) its device kernels."""

from subten.kernels.attention.inputs import AttentionInputs, LayerCache, MeanKey, PrefillRule, WideTokens

__all__ = ["AttentionInputs", "LayerCache", "MeanKey", "PrefillRule", "WideTokens"]
