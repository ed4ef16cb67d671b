"""Decode steps of whole models, as an engine takes them: timed on the host and on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from subten.bench.clocks import clocks_during
from subten.bench.decoding import Decoding
from subten.bench.filled_cache import CacheKind
from subten.bench.latency_cases import (
    BATCHES_TRIED,
    LatencyCase,
    MoE,
    WatchedMoE,
    step_bytes,
    weight_bytes,
    with_moe,
)
from subten.bench.latency_report import LargestRow, LatencyRow, Profile, StepTimes, percentile
from subten.bench.machine import Machine, first_line, require_sound_device
from subten.bench.profiling import profile_step
from subten.bench.random_model import random_model_calibration
from subten.engine.calibrate import Calibration, calibration_for
from subten.engine.loading import LoadedModel
from subten.engine.sampling import SamplingParams
from subten.errors import CacheMemoryError, SubtenError
from subten.formats import KVFormat
from subten.kernels.compilations import count_allocations, count_compilations
from subten.kernels.moe import MoEWeights

_ROUND = 256
"""Steps that are timed between two beginnings, so that no context is much shorter than it is said to be."""
_UNTIMED = 8
"""Steps behind a beginning, in which the host writes what rows hold."""
_SIDE_STEPS = 64
"""Of what is measured beside the host's clock."""

OUT_OF_TIME = "the time was over"
"""The reason of rows that were not begun any more."""

Taken = Callable[[LatencyRow | LargestRow], None]
"""Is given rows as they come."""


@dataclass(frozen=True)
class StepWishes:
    """What is measured of every case.

    Attributes:
        steps: timed on the host's clock.
        params: how tokens are chosen.
        mean_key: whether the cache of a random model removes a mean key where its format may.
        profile: whether a step is taken apart by kernels.
        largest_ms: the largest batch whose p99 is below this is looked for as well; None does not.
    """

    steps: int
    params: SamplingParams
    mean_key: bool = False
    profile: bool = False
    largest_ms: float | None = None


@dataclass(frozen=True)
class BenchModel:
    """A model to measure.

    Attributes:
        loaded: the model.
        weights: what its weights are, see `LatencyRow.weights`.
        random: whether they, and so its calibration, are made up.
    """

    loaded: LoadedModel
    weights: str
    random: bool

    def calibration(self, fmt: KVFormat, *, mean_key: bool) -> Calibration | None:
        """How a format codes its cache."""
        if not fmt.calibrated:
            return None
        if self.random:
            return random_model_calibration(fmt, self.loaded, mean_key=mean_key)
        return calibration_for(self.loaded)


class LatencyBench:
    """Measures one way of computing experts of one model, cache after cache.

    Args:
        machine: where it runs.
        model: the model.
        moe: how its experts are computed.
        wishes: what is measured.
        out_of_time: whether no more cases may begin.

    Raises:
        KernelUnavailableError: the experts can't be computed so.
    """

    def __init__(
        self, machine: Machine, model: BenchModel, moe: MoE, wishes: StepWishes, out_of_time: Callable[[], bool]
    ) -> None:
        self._machine, self._wishes, self._out_of_time = machine, wishes, out_of_time
        self._of = model
        self._model, self._watched = with_moe(model.loaded, moe)
        self._device = model.loaded.device

    def measure(self, cases: Sequence[LatencyCase], take: Taken) -> None:
        """Cases of one format and context, in ascending order of their batches; every one becomes a row.

        Raises:
            KernelUnavailableError: the device stopped working.
            Exception: what `take` raises, such as a StorageError.
        """
        left = list(cases)
        rows = self._measure(left)
        while True:
            try:
                row = next(rows, None)
            except Exception as failure:  # whatever a compiler or a driver raises: the other rows are still wanted
                reason = self._reason(failure)
                for case in left:
                    take(missing(case, reason))
                break
            if row is None:
                break
            take(row)
        release_memory(self._device)

    def _measure(self, left: list[LatencyCase]) -> Iterator[LatencyRow | LargestRow]:
        """Takes cases off the list as they become rows."""
        case, wishes = left[0], self._wishes
        release_memory(self._device)
        kind = CacheKind.of(self._model, case.kv, case.context)
        wanted = {one.batch for one in left} | set(BATCHES_TRIED if wishes.largest_ms is not None else ())
        decoding, most = self._decoding(kind, sorted(wanted))
        measured: dict[int, float] = {}
        while left:
            row = self._row(left[0], kind, decoding, most)
            if row.p99_ms is not None:
                measured[row.batch] = row.p99_ms
            del left[0]
            yield row
        if wishes.largest_ms is not None:
            yield self._largest(case, wishes.largest_ms, most, measured, decoding)

    def _decoding(self, kind: CacheKind, batches: Sequence[int]) -> tuple[Decoding, int]:
        """For the largest of these batches that there is memory for, its graphs included; and which that is."""
        wishes = self._wishes
        most = kind.most(self._model, batches)
        calibration = self._of.calibration(kind.layout.format, mean_key=wishes.mean_key)
        while True:
            try:
                return Decoding(
                    self._model, kind, [batch for batch in batches if batch <= most], calibration, wishes.params
                ), most
            except (CacheMemoryError, RuntimeError) as failure:
                if most == batches[0] or not _for_want_of_memory(failure):
                    raise
            release_memory(self._device)
            most = max(batch for batch in batches if batch < most)

    def _row(self, case: LatencyCase, kind: CacheKind, decoding: Decoding, most: int) -> LatencyRow:
        if self._out_of_time():
            return missing(case, OUT_OF_TIME)
        if case.batch > most:
            size = kind.bytes_for(self._model, case.batch) / 1e9
            return missing(case, f"the device's memory has no room for a cache of {size:.1f} GB")
        try:
            times = time_steps(decoding, self._model, self._watched, case, self._wishes.steps)
        except Exception as failure:  # as above
            return missing(case, self._reason(failure))
        profile, note = None, None
        if self._wishes.profile:
            try:
                profile = profiled(decoding, case, self._device)
            except Exception as failure:  # as above
                note = f"no profile: {self._reason(failure)}"
        return make_row(case, kind, self._of, times, profile, note, self._machine)

    def _largest(
        self, case: LatencyCase, limit: float, most: int, measured: dict[int, float], decoding: Decoding
    ) -> LargestRow:
        """By bisection between those that were measured, as a larger batch is never faster by more than noise."""
        sizes, note = [size for size in BATCHES_TRIED if size <= most], None
        # Below `first` all are fast enough, from `last` on none is.
        last = min((sizes.index(size) for size, ms in measured.items() if ms >= limit), default=len(sizes))
        first = max((i + 1 for i, size in enumerate(sizes[:last]) if size in measured), default=0)
        while first < last:
            middle = (first + last) // 2
            size = sizes[middle]
            if size not in measured:
                if self._out_of_time():
                    note = OUT_OF_TIME
                    break
                try:
                    taken, _ = timed_loop(decoding, case.context, size, self._wishes.steps)
                except Exception as failure:  # as above
                    note = f"batch {size}: {self._reason(failure)}"
                    break
                measured[size] = percentile(taken, 99) * 1000
            if measured[size] < limit:
                first = middle + 1
            else:
                last = middle
        batch = max((size for size, ms in measured.items() if ms < limit), default=None)
        beyond = min((size for size, ms in measured.items() if ms >= limit), default=None)
        if note is None and beyond is None:
            more = most < BATCHES_TRIED[-1]
            note = "the device's memory has no room for more" if more else "no larger batch was tried"
        return LargestRow(
            shape=case.shape,
            context=case.context,
            kv=case.kv.name,
            moe=case.moe,
            limit_ms=limit,
            batch=batch,
            p99_ms=None if batch is None else measured[batch],
            next_batch=beyond,
            next_p99_ms=None if beyond is None else measured[beyond],
            note=note,
        )

    def _reason(self, failure: Exception) -> str:
        if isinstance(failure, SubtenError):
            return str(failure)
        if self._device.type == "cuda":
            require_sound_device(failure)
        return f"{type(failure).__name__}: {first_line(failure)}"


def time_steps(
    decoding: Decoding, model: LoadedModel, watched: WatchedMoE, case: LatencyCase, steps: int
) -> StepTimes:
    """Everything that is measured of one batch.

    Raises:
        NumericalError: logits are not finite.
    """
    batch, instruments = case.batch, decoding.instruments
    side = min(_SIDE_STEPS, round_of(case.context))
    visited = visited_experts(decoding, watched, batch)
    compilations, allocations = count_compilations(model.device), count_allocations(model.device)
    timed, loop = timed_loop(decoding, case.context, batch, steps)
    compiled, allocated = compilations(), allocations()
    usage = decoding.usage
    halfway = [length - min(steps, round_of(case.context)) // 2 for length in decoding.lengths]
    visited += visited_experts(decoding, watched, batch)
    decoding.begin(batch, _UNTIMED + side)
    decoding.steps(_UNTIMED)
    on_device = instruments.device_ms(lambda: decoding.steps(side))
    clocks = clocks_during(partial(take_side_steps, decoding, batch, side), model.device)
    decoding.begin(batch, _UNTIMED + side)
    decoding.steps(_UNTIMED)
    host: list[float] = []

    def without_graphs() -> None:
        for _ in range(side):
            start = perf_counter()
            decoding.steps(1)
            host.append(perf_counter() - start)

    with undisturbed():
        instruments.without_graphs(without_graphs)
    layers = sum(isinstance(layer.feed_forward, MoEWeights) for layer in model.decoder.weights.layers)
    by_layer = [sum(visited[i::layers]) * layers / len(visited) for i in range(layers)]
    return StepTimes(
        steps=len(timed),
        p50_ms=1000 * percentile(timed, 50),
        p99_ms=1000 * percentile(timed, 99),
        max_ms=1000 * max(timed),
        loop_p50_ms=1000 * percentile(loop, 50),
        loop_p99_ms=1000 * percentile(loop, 99),
        device_ms=percentile(on_device, 50) if on_device else None,
        host_ms=1000 * percentile(host, 50),
        experts=sum(by_layer) / layers if layers else None,
        bytes=step_bytes(model, decoding.layout, halfway, by_layer),
        cache_bytes=usage.held_bytes,
        bits=usage.bits_per_element,
        compilations=compiled,
        device_allocations=allocated,
        sm_mhz=None if clocks is None else clocks.sm_mhz,
        power_w=None if clocks is None else clocks.power_w,
    )


def take_side_steps(decoding: Decoding, batch: int, steps: int) -> None:
    """So many, of new sequences."""
    decoding.begin(batch, steps)
    decoding.steps(steps)


def timed_loop(decoding: Decoding, context: int, batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each of so many steps: around the step alone, and from tokens to tokens."""
    timed: list[float] = []
    loop: list[float] = []
    most = round_of(context)
    with undisturbed():
        while len(timed) < steps:
            count = min(most, steps - len(timed))
            decoding.begin(batch, _UNTIMED + count)
            decoding.steps(_UNTIMED)
            before = perf_counter()
            for _ in range(count):
                works = decoding.works()
                start = perf_counter()
                decoding.decode(works)
                end = perf_counter()
                timed.append(end - start)
                loop.append(end - before)
                before = end
    return timed, loop


def visited_experts(decoding: Decoding, watched: WatchedMoE, batch: int) -> list[int]:
    """How many different experts each layer's tokens visit in one step, of a batch that has taken some."""
    decoding.begin(batch, 2 * _UNTIMED)
    decoding.steps(_UNTIMED)
    watched.watching, watched.visited = True, []
    try:
        decoding.take_eagerly()
    finally:
        watched.watching = False
    return watched.visited


def profiled(decoding: Decoding, case: LatencyCase, device: torch.device) -> Profile:
    """A step of the case by kernels."""
    decoding.begin(case.batch, 4 * _UNTIMED)
    return profile_step(lambda: decoding.steps(1), decoding.take_eagerly, device)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without garbage collections, as an engine that is warm."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _for_want_of_memory(failure: BaseException | None) -> bool:
    """Whether this is so, or what it came of: a graph that ends early complains of that instead."""
    while failure is not None and not isinstance(failure, CacheMemoryError | torch.OutOfMemoryError):
        failure = failure.__context__
    return failure is not None


def release_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def round_of(context: int) -> int:
    """Steps between two beginnings: the shortest contexts are not to be shortened by much."""
    return min(_ROUND, context // 4)


def missing(case: LatencyCase, reason: str) -> LatencyRow:
    """The row of a case that has no figure."""
    return LatencyRow(case.shape, case.batch, case.context, case.kv.name, case.moe, note=reason)


def make_row(
    case: LatencyCase,
    kind: CacheKind,
    model: BenchModel,
    times: StepTimes,
    profile: Profile | None,
    note: str | None,
    machine: Machine,
) -> LatencyRow:
    """A measurement with everything that follows from it."""
    roofline = times.bytes / machine.read_tb_per_s / 1e9
    return LatencyRow(
        shape=case.shape,
        batch=case.batch,
        context=case.context,
        kv=case.kv.name,
        moe=case.moe,
        attention=kind.attention,
        weights=model.weights,
        weights_gb=weight_bytes(model.loaded) / 1e9,
        steps=times.steps,
        p50_ms=times.p50_ms,
        p99_ms=times.p99_ms,
        p99_over_p50=times.p99_ms / times.p50_ms,
        max_ms=times.max_ms,
        loop_p50_ms=times.loop_p50_ms,
        loop_p99_ms=times.loop_p99_ms,
        device_ms=times.device_ms,
        host_ms=times.host_ms,
        tokens_per_s=1000 * case.batch / times.loop_p50_ms,
        experts=times.experts,
        bytes=times.bytes,
        gb_per_s=times.bytes / times.p50_ms / 1e6,
        roofline_ms=roofline,
        share=roofline / times.p50_ms,
        cache_gb=times.cache_bytes / 1e9,
        bits=times.bits,
        compilations=times.compilations,
        device_allocations=times.device_allocations,
        sm_mhz=times.sm_mhz,
        power_w=times.power_w,
        profile=profile,
        note=note,
    )
