"""Decode attention over a quantised cache: checked, then timed, beside the peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subten.bench.caches import (
    BenchCache,
    Calibration,
    NewTokens,
    build_cache,
    layer_bytes,
    random_calibration,
    reference,
)
from subten.bench.checks import ALLOWED, require
from subten.bench.kernels import Attend, DecodeKernel, is_for
from subten.bench.machine import Machine, first_line, require_sound_device
from subten.bench.peers import Peers, measure_peers
from subten.bench.report import AttentionRow
from subten.bench.shapes import Case, Shape
from subten.bench.timing import REPLAYS, Timer, Timing, copies_past, time_calls
from subten.errors import CacheMemoryError, KernelUnavailableError, NumericalError
from subten.formats import PAGE_SIZE, KVFormat, PageLayout
from subten.kernels.attention.cost import attention_bytes

_RAGGED = (1, 64, 193, 256, 257, 320, 700)
"""Contexts of the first check: no coded token, one, a page less one, whole pages, one more, some pages."""

Append = Callable[..., Any]
"""`append_decode`: (q, k, v, layer, inputs) to the queries as a decode kernel takes them."""


@dataclass(frozen=True)
class Wanted:
    """What to measure of every case.

    Attributes:
        formats: of the cache.
        kernels: by name.
        mean_keys: with a mean key's term (True), without, or both; formats that remove none have no term.
        replays: of a graph.
    """

    formats: Sequence[KVFormat]
    kernels: Sequence[str]
    mean_keys: Sequence[bool]
    replays: int = REPLAYS


@dataclass(frozen=True)
class Variant:
    """One figure of a case: a kernel on a format."""

    fmt: KVFormat
    kernel: str
    mean_key: bool


@dataclass
class AttentionBench:
    """Measures case after case, and remembers what was compiled and checked before.

    Attributes:
        machine: where it runs.
        device: likewise.
        with_fa3: whether FlashAttention-3 is loaded.
        append: `append_decode`.
        load: from a kernel's name to the kernel.
        timer: of calls that are right, given the number of replays.
    """

    machine: Machine
    device: torch.device
    with_fa3: bool
    append: Append
    load: Callable[[str], DecodeKernel] = DecodeKernel.load
    timer: Timer = time_calls
    _checked: dict[tuple[Variant, Shape], str | None] = field(default_factory=dict)

    def rows(self, case: Case, wanted: Wanted) -> Iterator[AttentionRow]:
        """All rows of one shape and context, as they come."""
        peers = measure_peers(case, self.device, with_fa3=self.with_fa3, replays=wanted.replays)
        torch.cuda.empty_cache()
        for fmt in wanted.formats:
            layout = PageLayout(fmt, case.shape.head_dim)
            try:
                for variant, timing, error, reason in self.figures(case, layout, wanted):
                    yield make_row(case, layout, variant, timing, error, reason, peers, self.machine)
            except (CacheMemoryError, torch.OutOfMemoryError) as error:
                for variant in variants(fmt, wanted):
                    yield make_row(case, layout, variant, None, None, first_line(error), peers, self.machine)
            torch.cuda.empty_cache()

    def figures(
        self, case: Case, layout: PageLayout, wanted: Wanted
    ) -> Iterator[tuple[Variant, Timing | None, float | None, str | None]]:
        """One format's variants: time and error, or the reason why there is none.

        Raises:
            CacheMemoryError: the device has no room for the caches.
            torch.OutOfMemoryError: likewise.
            KernelUnavailableError: it stopped working.
        """
        shape, scale = case.shape, 1 / math.sqrt(case.shape.head_dim)
        calibration = random_calibration(layout.format, shape, max(case.context, *_RAGGED) + PAGE_SIZE, self.device)
        copies = copies_past(self.machine.l2_bytes, layer_bytes(layout, shape, case.context))
        cache = build_cache(layout, shape.kv_heads, [case.context] * shape.batch, copies, calibration)
        for variant in variants(layout.format, wanted):
            try:
                kernel = self.load(variant.kernel)
                self._check_ragged(kernel, variant, shape, calibration, layout)
                seen = cache.with_mean_key(calibration.mean_key if variant.mean_key else None)
                tokens = NewTokens.random(shape, self.device)
                calls = decode_calls(seen, tokens, self.append, kernel, scale)
                ends = sorted({0, shape.batch - 1})
                result = calls[0]()
                error = require([(result[row], reference(seen, 0, tokens, row, scale)) for row in ends], ALLOWED)
                yield variant, self.timer(calls, wanted.replays), error, None
            except (KernelUnavailableError, NumericalError) as refusal:
                yield variant, None, None, str(refusal)
            except Exception as failure:  # whatever a compiler or a driver raises: the other rows are still wanted
                require_sound_device(failure)
                yield variant, None, None, f"{type(failure).__name__}: {first_line(failure)}"

    def _check_ragged(
        self, kernel: DecodeKernel, variant: Variant, shape: Shape, calibration: Calibration, layout: PageLayout
    ) -> None:
        """Short sequences of different lengths in one batch, once per kernel and heads.

        Raises:
            NumericalError: a result is wrong, now or the first time.
        """
        key = variant, Shape(1, shape.kv_heads, shape.group, shape.head_dim)
        if key not in self._checked:
            self._checked[key] = "it failed its check before"
            check_ragged(kernel, variant.mean_key, shape, calibration, layout, self.append)
            self._checked[key] = None
        reason = self._checked[key]
        if reason is not None:
            raise NumericalError(reason)


def variants(fmt: KVFormat, wanted: Wanted) -> list[Variant]:
    """What is measured of a format."""
    terms = [term for term in wanted.mean_keys if fmt.key.remove_mean or not term] or [False]
    return [Variant(fmt, kernel, term) for term in terms for kernel in wanted.kernels if is_for(kernel, fmt)]


def check_ragged(
    kernel: DecodeKernel,
    mean_key: bool,
    shape: Shape,
    calibration: Calibration,
    layout: PageLayout,
    append: Append,
) -> float:
    """Compare a kernel with the torch reference on sequences of different short lengths; the largest relative error.

    Raises:
        NumericalError: one is wrong.
    """
    batch = Shape(len(_RAGGED), shape.kv_heads, shape.group, shape.head_dim)
    device = calibration.coding.kept_channels.device
    scale = 1 / math.sqrt(shape.head_dim)
    cache = build_cache(layout, shape.kv_heads, _RAGGED, 1, calibration)
    cache = cache.with_mean_key(calibration.mean_key if mean_key else None)
    tokens = NewTokens.random(batch, device)
    result = decode_calls(cache, tokens, append, kernel, scale)[0]()
    return require([(result[row], reference(cache, 0, tokens, row, scale)) for row in range(len(_RAGGED))], ALLOWED)


def decode_calls(
    cache: BenchCache, tokens: NewTokens, append: Append, kernel: DecodeKernel, scale: float
) -> list[Callable[[], Tensor]]:
    """The new tokens appended to every layer, and then one call of the kernel for each layer."""
    layers = [cache.layers.layer(index) for index in range(cache.num_layers)]
    integer = kernel.integer_query
    queries = [append(tokens.q, tokens.k, tokens.v, layer, cache.inputs, integer=integer) for layer in layers]
    attend: Attend = kernel.planned(queries[0], layers[0], cache.inputs)
    return [partial(attend, query, layer, cache.inputs, scale) for query, layer in zip(queries, layers, strict=True)]


def make_row(
    case: Case,
    layout: PageLayout,
    variant: Variant,
    timing: Timing | None,
    error: float | None,
    reason: str | None,
    peers: Peers,
    machine: Machine,
) -> AttentionRow:
    """A measurement with everything that follows from it."""
    shape = case.shape
    nbytes = attention_bytes(
        layout, shape.batch, shape.kv_heads, shape.group, case.context, mean_key=variant.mean_key
    )
    baseline = peers.torch_16_bit
    us = None if timing is None else timing.us
    tb_per_s = None if us is None else nbytes / us / 1e6
    notes = [reason, *(peer.reason and f"{peer.name}: {peer.reason}" for peer in vars(peers).values())]
    return AttentionRow(
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        context=case.context,
        format=variant.fmt.name,
        kernel=variant.kernel,
        mean_key=variant.mean_key,
        us=us,
        us_p10=None if timing is None else timing.us_p10,
        us_p90=None if timing is None else timing.us_p90,
        baseline_us=baseline.us,
        baseline=None if baseline.us is None else baseline.name,
        ratio=None if us is None or baseline.us is None else baseline.us / us,
        fa3_us=peers.fa3.us,
        fa3_fp8_us=peers.fa3_fp8.us,
        bytes=nbytes,
        tb_per_s=tb_per_s,
        read_share=None if tb_per_s is None else tb_per_s / machine.read_tb_per_s,
        error=error,
        note="; ".join(note for note in notes if note) or None,
    )
