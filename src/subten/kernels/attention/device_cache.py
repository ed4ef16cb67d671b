"""What the device kernels read of a cache: the memory of one layer or of all, and tables made of the codings once.

No kernel is imported here, so that a host which only counts pages, or asks whether a format is served, needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from subten.errors import KernelUnavailableError
from subten.formats.affine import parts
from subten.formats.coding import LayerCoding, TensorCoding
from subten.formats.hadamard import hadamard
from subten.formats.layout import PageLayout
from subten.formats.quantizers import GAUSSIAN_STEP
from subten.formats.shaping import NoiseShaper
from subten.formats.spec import PAGE_SIZE, KVFormat, TensorFormat
from subten.kernels.attention.gluon_plan import why_not_gluon
from subten.kernels.attention.gluon_tables import GluonTables
from subten.kernels.attention.inputs import LayerCache, MeanKey
from subten.kernels.rope import RopeTable

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256
CODED_AHEAD = 1
"""`PageLayout.ahead` of a cache that device kernels write."""


def refusal(layout: PageLayout) -> str | None:
    """Why the Triton kernels do not serve a layout, or None where they do."""
    fmt = layout.format
    if not (_served(fmt.key) and _served(fmt.value)):
        return (
            f"the triton kernels do not serve the KV format '{fmt.name}'; "
            "choose bf16, fp8, kv4, kv2, k4v2 or kv2-plain, or the torch kernels"
        )
    if not MIN_HEAD_DIM <= layout.head_dim <= MAX_HEAD_DIM:
        return (
            f"the triton kernels serve head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {layout.head_dim}; "
            "choose the torch ones"
        )
    return None


def _served(fmt: TensorFormat) -> bool:
    if fmt.group is not None or fmt.by_page:
        return False
    if fmt.code == "uniform":
        return fmt.offset and fmt.fit == "least_squares" and fmt.bits in GAUSSIAN_STEP
    return fmt.code == "e4m3" or (fmt.code == "wide" and fmt.bits == 16)


def tokens_in_pages(length: int, fmt: KVFormat) -> int:
    """Tokens whose codes are in the pages after a step that brought a sequence to `length` tokens.

    One more than `fmt.coded_tokens`: the token that leaves the window in the next step, which is all that a GPU
    codes ahead. Without a window there is none.
    """
    return fmt.tokens_in_pages(length, CODED_AHEAD)


@dataclass(frozen=True)
class Code:
    """What is compiled into a kernel of how keys, or values, are coded.

    Attributes:
        kind: `TensorFormat.code`.
        bits: of a code.
        parts: 16-bit numbers of a grid, 0 where there is none.
        transformed: whether rows are multiplied by `TensorCoding.to_coded`.
        shaped: whether rounding is.
    """

    kind: str
    bits: int
    parts: int
    transformed: bool
    shaped: bool


@dataclass(frozen=True)
class Places:
    """Where planes begin in a record, in units of 16 bits (0 where there is none); and how many channels are kept."""

    key_codes: int
    value_codes: int
    key_grids: int
    value_grids: int
    kept_pair: int
    num_kept: int

    @classmethod
    def of(cls, layout: PageLayout) -> Places:
        """In the records of a layout."""
        starts = {name: plane.offset // 2 for name, plane in layout.planes.items()}
        return cls(
            starts["key_codes"],
            starts["value_codes"],
            starts.get("key_scale", 0),
            starts.get("value_scale", 0),
            starts.get("kept_pair", 0),
            2 * layout.format.key.kept_pairs,
        )


@dataclass(frozen=True)
class CodingTables:
    """The codings of one or more layers of one model.

    `n` is head_dim filled up with zeros to a power of two. Coordinates of a shaped side are in the order of rounding.
    A side that is not transformed, or not shaped, has zeros beside one that is.

    Attributes:
        key: how keys are coded.
        value: how values are.
        places: where planes are in a record.
        hadamard: whether keys, and values, are taken into coded space by the Hadamard transform alone.
        transform: float32 [layers, 2 (K, V), num_kv_heads, head_dim, n], `to_coded`. None where nothing is
            transformed.
        feedback: int32 [layers, 2, num_kv_heads, head_dim / 2, n], transposed; the float16 numbers (which is what it
            consists of) of rows 2i and 2i + 1 in one, the first in its lower half. None where nothing is shaped.
        metric: likewise.
        vectors: float32 [layers, 2, num_kv_heads, 3, n], sums of the metric's rows, inverses of its diagonal, and the
            sum of all of it, n times. None where nothing is shaped.
        order: int32 [layers, 2, num_kv_heads, 2, n], which channel is rounded when, and when a channel is rounded.
            None where nothing is shaped.
        kept_channels: int32 [layers, num_kv_heads, num_kept].
        query_matrix: float16 [layers, num_kv_heads, head_dim, n], `key.from_coded` transposed, zero in the lines of
            kept channels. None where keys are not transformed.
        output_matrix: float32 [layers, num_kv_heads, head_dim, n], `value.from_coded`. None where values are not
            transformed.
        mean: float32 [layers, num_kv_heads, head_dim], 0 in layers that remove none. None where none does.
        rope: of `mean`.
        rotation: float16 [2 (cos, sin), 64, head_dim / 2], from a page's first token to each of its tokens, the
            amplitude of `rope` taken out. None where there is no `mean`.
        gluon: what the Gluon decode kernel needs besides. None where it does not serve the layout.
    """

    key: Code
    value: Code
    places: Places
    hadamard: tuple[bool, bool]
    transform: Tensor | None
    feedback: Tensor | None
    metric: Tensor | None
    vectors: Tensor | None
    order: Tensor | None
    kept_channels: Tensor
    query_matrix: Tensor | None
    output_matrix: Tensor | None
    mean: Tensor | None
    rope: RopeTable | None
    rotation: Tensor | None
    gluon: GluonTables | None

    @classmethod
    def of(
        cls, layout: PageLayout, codings: Sequence[LayerCoding], mean_keys: Sequence[MeanKey | None]
    ) -> CodingTables:
        """Of one coding and one mean key per layer.

        Raises:
            KernelUnavailableError: the kernels do not serve the format or head_dim.
        """
        reason = refusal(layout)
        if reason is not None:
            raise KernelUnavailableError(reason)
        sides = [side for coding in codings for side in (coding.key, coding.value)]
        kept = torch.stack([coding.kept_channels for coding in codings])
        blank = torch.zeros(kept.shape[1], layout.head_dim, layout.head_dim, device=kept.device)
        shapers = [None if side is None else side.shaper for side in sides]
        plain = hadamard(torch.eye(layout.head_dim, device=kept.device))
        alone = [
            all(side is not None and bool((side.to_coded == plain).all()) for side in sides[i::2]) for i in (0, 1)
        ]
        query_matrix = _query_matrix(codings)
        means, rope, rotation = _mean(mean_keys)
        gluon = None
        if why_not_gluon(layout) is None and query_matrix is not None:
            gluon = GluonTables.of(codings, means, rope, layout.format.sinks)
        return cls(
            _code(layout.format.key, codings[0].key),
            _code(layout.format.value, codings[0].value),
            Places.of(layout),
            (alone[0], alone[1]),
            _by_layer_and_side([_transform(side, blank) for side in sides]) if any(sides) else None,
            _by_layer_and_side([_pairs(blank if x is None else x.feedback.mT) for x in shapers])
            if any(shapers)
            else None,
            _by_layer_and_side([_pairs(blank if x is None else x.metric) for x in shapers]) if any(shapers) else None,
            _by_layer_and_side([_vectors(shaper, blank) for shaper in shapers]) if any(shapers) else None,
            _by_layer_and_side([_order(shaper, blank) for shaper in shapers]) if any(shapers) else None,
            kept.int(),
            query_matrix,
            _output_matrix(codings),
            means,
            rope,
            rotation,
            gluon,
        )

    def layer(self, index: int) -> CodingTables:
        """Of one of the layers, as views."""
        part = slice(index, index + 1)
        return replace(
            self,
            transform=None if self.transform is None else self.transform[part],
            feedback=None if self.feedback is None else self.feedback[part],
            metric=None if self.metric is None else self.metric[part],
            vectors=None if self.vectors is None else self.vectors[part],
            order=None if self.order is None else self.order[part],
            kept_channels=self.kept_channels[part],
            query_matrix=None if self.query_matrix is None else self.query_matrix[part],
            output_matrix=None if self.output_matrix is None else self.output_matrix[part],
            mean=None if self.mean is None else self.mean[part],
            gluon=None if self.gluon is None else self.gluon.layer(part),
        )


@dataclass(frozen=True)
class PagedLayers:
    """The caches of one or more layers.

    Attributes:
        pages: uint8 [layers, num_pages, num_kv_heads, record_bytes]; the last axis is contiguous.
        windows: [layers, num_slots, 2, num_kv_heads, window_size, head_dim]; the last two axes are contiguous.
        tables: how the layers are coded.
        layout: of a record.
    """

    pages: Tensor
    windows: Tensor
    tables: CodingTables
    layout: PageLayout

    @classmethod
    def of(cls, caches: Sequence[LayerCache]) -> PagedLayers:
        """Of layers that lie at equal distances in the same allocations, as those of one cache do.

        Raises:
            KernelUnavailableError: the kernels do not serve the format or head_dim.
        """
        layout = caches[0].layout
        return cls(
            _as_one([cache.pages for cache in caches]),
            _as_one([cache.windows for cache in caches]),
            CodingTables.of(layout, [cache.coding for cache in caches], [cache.mean_key for cache in caches]),
            layout,
        )

    def layer(self, index: int) -> PagedLayers:
        """One of the layers, as views."""
        part = slice(index, index + 1)
        return PagedLayers(self.pages[part], self.windows[part], self.tables.layer(index), self.layout)


def _code(fmt: TensorFormat, coding: TensorCoding | None) -> Code:
    shaped = coding is not None and coding.shaper is not None
    return Code(fmt.code, fmt.bits, parts(fmt)[1] if fmt.coded else 0, coding is not None, shaped)


def _transform(side: TensorCoding | None, blank: Tensor) -> Tensor:
    if side is None:
        return blank
    if side.shaper is None:
        return side.to_coded
    return side.to_coded.take_along_dim(side.shaper.order[:, None], -1)


def _pairs(matrices: Tensor) -> Tensor:
    """Two rows of float16 numbers in one of int32."""
    pairs: Tensor = matrices.half().unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
    return pairs.view(torch.int32).squeeze(-1)


def _vectors(shaper: NoiseShaper | None, blank: Tensor) -> Tensor:
    if shaper is None:
        return blank[:, :3]
    weights = shaper.metric.sum(1)
    total = weights.sum(1, keepdim=True).expand_as(weights)
    return torch.stack([weights, 1 / shaper.metric.diagonal(dim1=-2, dim2=-1), total], dim=1)


def _order(shaper: NoiseShaper | None, blank: Tensor) -> Tensor:
    if shaper is None:
        return blank[:, :2].int()
    return torch.stack([shaper.order, shaper.order.argsort(-1)], dim=1).int()


def _by_layer_and_side(tensors: Sequence[Tensor]) -> Tensor:
    return _filled_up(torch.stack(list(tensors)).unflatten(0, (-1, 2)))


def _filled_up(x: Tensor) -> Tensor:
    """With zeros, to a power of two on the last axis."""
    size = x.shape[-1]
    return pad(x, (0, (1 << (size - 1).bit_length()) - size)).contiguous()


def _query_matrix(codings: Sequence[LayerCoding]) -> Tensor | None:
    # Float16 holds it: a rotation, and a whitening of WHITENING_FLOOR and head_dim bounds it by 10.
    matrices = [
        coding.key.from_coded.transpose(1, 2).scatter(
            1, coding.kept_channels[:, :, None].expand(-1, -1, coding.key.from_coded.shape[-1]), 0.0
        )
        for coding in codings
        if coding.key is not None
    ]
    return _filled_up(torch.stack(matrices)).half() if matrices else None


def _output_matrix(codings: Sequence[LayerCoding]) -> Tensor | None:
    matrices = [coding.value.from_coded for coding in codings if coding.value is not None]
    return _filled_up(torch.stack(matrices)) if matrices else None


def _mean(mean_keys: Sequence[MeanKey | None]) -> tuple[Tensor | None, RopeTable | None, Tensor | None]:
    some = next((mean_key for mean_key in mean_keys if mean_key is not None), None)
    if some is None:
        return None, None, None
    none = torch.zeros_like(some.mean)
    means = torch.stack([none if mean_key is None else mean_key.mean for mean_key in mean_keys])
    return means, some.rope, _rotation_in_page(some.rope)


def _rotation_in_page(rope: RopeTable) -> Tensor:
    first = torch.stack([rope.cos[:PAGE_SIZE], rope.sin[:PAGE_SIZE]]) / rope.cos[0]
    return pad(first, (0, 0, 0, PAGE_SIZE - first.shape[1])).half()


def _as_one(views: Sequence[Tensor]) -> Tensor:
    """Views at equal distances as one tensor, without a copy."""
    starts = [view.data_ptr() // view.itemsize for view in views]
    steps = {after - before for before, after in pairwise(starts)} or {0}
    if len(steps) > 1:
        raise ValueError("the layers of a cache must lie at equal distances in one allocation")
    first = views[0]
    return first.as_strided((len(views), *first.shape), (steps.pop(), *first.stride()))
