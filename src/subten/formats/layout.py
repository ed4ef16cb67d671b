"""Where the bytes of a page lie: planes, their order and offsets, and every byte count derived from them.

A page is 64 tokens of all layers and KV heads in one stretch of memory; what a fork, a spill or a plugin
copies is bytes. Within it each layer and head has one *record* made of planes. For `kv2` at head_dim 128:

    key_codes    64 x 16 int16   2048 B   slot-major:  a token's words are neighbours
    value_codes  16 x 64 int16   2048 B   word-major:  a word's slots are neighbours
    key_scale    64      int16    128 B   scale and offset in one word
    value_scale  64      int16    128 B
    kept_pair    64 x 2  fp16     256 B   channels c and c + 64, unrotated
                                 4608 B = 2.25 bits per element
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from subten.errors import UnknownFormatError
from subten.formats.affine import parts
from subten.formats.packing import words_per_token
from subten.formats.spec import PAGE_SIZE, CacheGeometry, KVFormat, TensorFormat

LAYOUT_VERSION = 2
PLANE_ALIGNMENT = 16
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True)
class Plane:
    """One array inside a record: a dtype, a shape, and the byte offset where it starts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the plane, without the padding behind it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageLayout:
    """The record of one page, layer and KV head for a format and head_dim; and how many of them a sequence takes.

    Attributes:
        format: the format.
        head_dim: channels of a head.
        ahead: steps before a token leaves the window in which its codes are written: 1 where the kernels of a GPU do
            it, 0 where a page is there in time for the token that leaves. No byte of a record depends on it.

    Raises:
        UnknownFormatError: head_dim is not a multiple of 16.
    """

    format: KVFormat
    head_dim: int
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % HEAD_DIM_MULTIPLE:
            raise UnknownFormatError(
                f"head_dim {self.head_dim} can't be paged; it must be a multiple of {HEAD_DIM_MULTIPLE}"
            )

    @cached_property
    def planes(self) -> Mapping[str, Plane]:
        """The planes by name, in the order in which they lie in memory."""
        planes: dict[str, Plane] = {}
        offset = 0
        for name, dtype, shape in self._plane_shapes():
            planes[name] = Plane(dtype, shape, offset)
            offset = _align(offset + planes[name].nbytes)
        return planes

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: 64 tokens of one layer and KV head."""
        last = list(self.planes.values())[-1]
        return _align(last.offset + last.nbytes)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Element type of the sink and recent windows, and of pages that code nothing."""
        return torch.float32 if self.format.wide_bits == 32 else torch.bfloat16

    def view(self, pages: Tensor, name: str) -> Tensor:
        """A plane of many records as a live view.

        Args:
            pages: uint8 [..., record_bytes], last axis contiguous.
            name: plane name.

        Returns:
            [..., *plane.shape] of the plane's dtype, sharing memory with `pages`.
        """
        plane = self.planes[name]
        raw = pages[..., plane.offset : plane.offset + plane.nbytes]
        typed: Tensor = raw.view(plane.dtype).unflatten(-1, plane.shape)
        return typed

    def page_bytes(self, geometry: CacheGeometry) -> int:
        """Bytes of one page over all layers and KV heads."""
        return self.record_bytes * geometry.num_layers * geometry.num_kv_heads

    def window_bytes(self, geometry: CacheGeometry) -> int:
        """Bytes of one sequence's sink and recent windows over all layers and KV heads."""
        return geometry.elements(self.format.window_size) * self.wide_dtype.itemsize

    def pages_for(self, length: int) -> int:
        """Pages of a sequence of `length` tokens."""
        return -(-self.tokens_in_pages(length) // PAGE_SIZE)

    def tokens_in_pages(self, length: int) -> int:
        """Tokens of a sequence of `length` that its pages have room for."""
        return self.format.tokens_in_pages(length, self.ahead)

    def cache_bytes(self, geometry: CacheGeometry, length: int, batch: int = 1) -> int:
        """Bytes that `batch` sequences of `length` tokens hold: pages and windows, nothing left out."""
        pages = self.pages_for(length) * self.page_bytes(geometry)
        return batch * (pages + self.window_bytes(geometry))

    def coded_bits(self) -> float:
        """Bits per element of a full page (windows not counted)."""
        return self.record_bytes * 8 / (2 * PAGE_SIZE * self.head_dim)

    def _plane_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        key, value = self.format.key, self.format.value
        shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            ("key_codes", *self._codes(key, slot_major=True)),
            ("value_codes", *self._codes(value, slot_major=False)),
        ]
        for name, fmt in (("key", key), ("value", value)):
            if fmt.coded:
                shapes.append((f"{name}_scale", *self._scale(fmt)))
        if key.kept_pairs:
            shapes.append(("kept_pair", torch.float16, (PAGE_SIZE, 2 * key.kept_pairs)))
        for name, fmt in (("key", key), ("value", value)):
            if fmt.kept_fraction:
                shapes.append((f"{name}_kept", torch.float16, (PAGE_SIZE, self.head_dim)))
        return shapes

    def _codes(self, fmt: TensorFormat, *, slot_major: bool) -> tuple[torch.dtype, tuple[int, ...]]:
        if not fmt.coded:
            return (torch.float32 if fmt.bits == 32 else torch.bfloat16), (PAGE_SIZE, self.head_dim)
        words = words_per_token(self.head_dim, fmt.bits)
        return torch.int16, ((PAGE_SIZE, words) if slot_major else (words, PAGE_SIZE))

    def _scale(self, fmt: TensorFormat) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, count = parts(fmt)
        if fmt.axis == "channel":
            return dtype, (self.head_dim, count)
        return dtype, (PAGE_SIZE, fmt.groups(self.head_dim), count)


def _align(offset: int) -> int:
    return -(-offset // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
