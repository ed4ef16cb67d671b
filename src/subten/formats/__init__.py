"""Bits in memory: KV formats as data, page layouts, and the plain-torch codec that every kernel is tested against."""

from subten.formats.catalog import DEFAULT_FORMAT, FORMATS, get_format
from subten.formats.layout import PageLayout
from subten.formats.spec import PAGE_SIZE, CacheGeometry, KVFormat, TensorFormat

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "PAGE_SIZE",
    "CacheGeometry",
    "KVFormat",
    "PageLayout",
    "TensorFormat",
    "get_format",
]
