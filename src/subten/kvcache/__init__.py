"""The cache's books (pages, windows, forks, prefixes) and its memory. Kernels live elsewhere."""

from subten.kvcache.books import CacheBooks, PrefixHit
from subten.kvcache.plans import AppendPlan, CopyPlan
from subten.kvcache.storage import CacheStorage, LayerStorage, SavedSequence, predicted_bytes

__all__ = [
    "AppendPlan",
    "CacheBooks",
    "CacheStorage",
    "CopyPlan",
    "LayerStorage",
    "PrefixHit",
    "SavedSequence",
    "predicted_bytes",
]
