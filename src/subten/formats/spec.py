"""What a KV format is: data. Nothing here touches a tensor; codec.py turns the data into bytes and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from subten.errors import UnknownFormatError

Code = Literal["wide", "e4m3", "uniform", "levels"]
Fit = Literal["least_squares", "absmax", "clip_search"]
ScaleAxis = Literal["token", "channel"]
Transform = Literal["none", "hadamard", "whitened"]
Rounding = Literal["nearest", "shaped"]
Affine = Literal["fp16", "packed"]

PAGE_SIZE = 64
"""Tokens in one page. Also the group of formats whose scales run along the tokens (`ScaleAxis` "channel")."""


@dataclass(frozen=True)
class TensorFormat:
    """How the keys, or the values, of one head are coded.

    Attributes:
        bits: bits of one code (2, 4, 8), or of one element where nothing is coded (16, 32).
        code: `wide` keeps elements as they are, `e4m3` is FP8, `uniform` codes are equally spaced levels,
            `levels` are the four levels in `level_values`.
        fit: how scale (and offset) are found: least squares on the codes, absolute maximum, or the clipping
            factor with the least squared error.
        group: channels (axis "token") that share a scale; None is the whole head. On axis "channel" a scale
            belongs to one channel and the tokens of one page.
        axis: the axis along which a scale is constant over a group of channels ("token": one per token and
            group) or over the tokens of a page ("channel": one per channel and page).
        offset: whether an offset is stored beside the scale (asymmetric codes).
        affine: how scale and offset are stored: two fp16 numbers, or both in 16 bits.
        transform: over head_dim before coding. `whitened` evens out the energy of directions before the
            Hadamard transform, as far as calibration finds it good; without calibration it is `hadamard`.
        rounding: each element to its nearest level, or `shaped` by what calibration knows of the errors' cost.
        remove_mean: whether calibration may take the mean key (before RoPE) out of every key before coding.
        kept_pairs: rotary pairs (c, c + head_dim / 2) taken out of the codes and kept in 16 bit.
        kept_fraction: largest elements by magnitude, per page and head, kept in a dense 16-bit plane.
        level_values: the four levels of `levels`, in units of the scale.
    """

    bits: int
    code: Code = "uniform"
    fit: Fit = "least_squares"
    group: int | None = None
    axis: ScaleAxis = "token"
    offset: bool = False
    affine: Affine = "fp16"
    transform: Transform = "none"
    rounding: Rounding = "nearest"
    remove_mean: bool = False
    kept_pairs: int = 0
    kept_fraction: float = 0.0
    level_values: tuple[float, ...] = ()

    @property
    def coded(self) -> bool:
        """Whether elements become codes at all (false for the 16- and 32-bit formats)."""
        return self.code != "wide"

    @property
    def calibrated(self) -> bool:
        """Whether calibration has a say in how elements become codes."""
        return self.kept_pairs > 0 or self.transform == "whitened" or self.rounding == "shaped" or self.remove_mean

    @property
    def by_page(self) -> bool:
        """Whether a page is coded as a whole, because scales or kept elements depend on all its tokens."""
        return self.axis == "channel" or self.kept_fraction > 0

    def groups(self, head_dim: int) -> int:
        """Number of scales of one token (axis "token"); the last group may be smaller than `group`."""
        return 1 if self.group is None else -(-head_dim // self.group)


@dataclass(frozen=True)
class KVFormat:
    """A KV cache format: one `TensorFormat` for keys, one for values, and the windows held in 16 bit.

    The first `sinks` tokens of a sequence and its last `recent` tokens (the newest included) are held
    unquantised; a token is coded when it leaves the recent window.
    """

    name: str
    key: TensorFormat
    value: TensorFormat
    sinks: int
    recent: int
    summary: str

    @property
    def granularity(self) -> int:
        """Tokens that are coded together: 1, or a page where a scale spans the tokens of a page."""
        return PAGE_SIZE if self.key.by_page or self.value.by_page else 1

    @property
    def ring_size(self) -> int:
        """Slots of the recent window: `recent`, and the incomplete page of formats coded by the page."""
        return self.recent + self.granularity - 1

    @property
    def window_size(self) -> int:
        """Tokens that one sequence's 16-bit windows have room for."""
        return self.sinks + self.ring_size

    @property
    def lossless(self) -> bool:
        """Whether reading the cache returns what was written, bit for bit."""
        return not (self.key.coded or self.value.coded)

    @property
    def calibrated(self) -> bool:
        """Whether calibration has a say in how keys or values become codes."""
        return self.key.calibrated or self.value.calibrated

    @property
    def wide_bits(self) -> int:
        """Bits of one element in the windows: 32 for the float32 format, 16 for all others."""
        return 32 if not self.key.coded and self.key.bits == 32 else 16

    def coded_tokens(self, length: int) -> int:
        """Tokens that live in pages once `length` tokens were appended; they follow the sinks.

        This one function is the visibility rule: the query at position i reads positions
        `sinks <= j < sinks + coded_tokens(i + 1)` through the codes and all others in 16 bit.
        """
        leaving = max(0, length - self.sinks - self.recent)
        return leaving - leaving % self.granularity

    def tokens_in_pages(self, length: int, ahead: int) -> int:
        """Tokens that pages must have room for once `length` tokens were appended: those of `coded_tokens`, and those
        of the next `ahead` steps as far as they are there already and tokens are coded one by one."""
        if self.granularity > 1:
            return self.coded_tokens(length)
        return min(self.coded_tokens(length + ahead), max(0, length - self.sinks))

    def with_windows(self, sinks: int | None = None, recent: int | None = None) -> KVFormat:
        """The same format with other windows. Formats that code nothing have none and ignore the request."""
        if self.lossless:
            return self
        sinks = self.sinks if sinks is None else sinks
        recent = self.recent if recent is None else recent
        if sinks < 0 or recent < 0:
            raise UnknownFormatError(
                f"windows of {sinks} sinks and {recent} recent tokens make no sense; both must be 0 or more"
            )
        return replace(self, sinks=sinks, recent=recent)


@dataclass(frozen=True)
class CacheGeometry:
    """The part of a model's shape that its cache depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def elements(self, length: int) -> int:
        """Elements of K and V together for `length` tokens."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * length
