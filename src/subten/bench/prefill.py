"""Chunks of prompts behind contexts of a given length: how long a step of a prompt takes, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import torch

from subten.bench.filled_cache import CacheKind, FilledCache
from subten.bench.latency import BenchModel, undisturbed
from subten.bench.latency_cases import WatchedMoE, step_bytes
from subten.bench.latency_report import Profile, percentile
from subten.bench.machine import Machine
from subten.bench.prefill_report import PrefillRow
from subten.bench.profiling import profile_step
from subten.engine.runner import Work
from subten.errors import NumericalError
from subten.formats import KVFormat
from subten.kernels.attention.cost import attention_flops
from subten.kernels.linear.reference import linear_flops
from subten.kernels.moe.reference import moe_flops
from subten.models.spec import DecoderSpec, MoESpec


@dataclass(frozen=True)
class PrefillCase:
    """One row's problem.

    Attributes:
        kv: format of the cache.
        context: tokens that the sequence holds before the chunk.
        chunk_size: tokens of the chunk.
    """

    kv: KVFormat
    context: int
    chunk_size: int

    @property
    def end(self) -> int:
        """Tokens of the sequence behind the chunk."""
        return self.context + self.chunk_size


@dataclass(frozen=True)
class PrefillWishes:
    """What is measured of every case.

    Attributes:
        chunks: that are timed.
        profile: whether a chunk is taken apart by kernels.
    """

    chunks: int
    profile: bool = False


class Prefilling:
    """A model, and a sequence at a time that gets a chunk more.

    Args:
        model: the model.
        fmt: of the cache.
        longest: tokens of a sequence with its chunk, at most.

    Raises:
        SubtenError: a subclass says what can't be had.
    """

    def __init__(self, model: BenchModel, fmt: KVFormat, longest: int) -> None:
        kind = CacheKind.of(model.loaded, fmt, longest)
        self._vocab_size = model.loaded.spec.vocab_size
        self.cache = FilledCache(model.loaded, kind, 1, model.calibration(fmt, mean_key=False))

    def take(self, context: int, chunk_size: int) -> tuple[float, float]:
        """Compute a chunk behind so many tokens: seconds until its logits are there, and until all was launched.

        Raises:
            NumericalError: logits are not finite.
        """
        books, runner = self.cache.books, self.cache.runner
        sequence = self.cache.open(context)
        tokens = torch.randint(self._vocab_size, (chunk_size,)).tolist()
        work = Work(books.append(sequence, tokens), tokens)
        start = perf_counter()
        logits = runner.run([work])
        launched = perf_counter()
        runner.synchronize()
        end = perf_counter()
        books.free(sequence)
        if not bool(torch.isfinite(logits).all()):
            raise NumericalError("the logits of these weights are not finite")
        return end - start, launched - start


@dataclass(frozen=True)
class PrefillBench:
    """Measures prompts of one model.

    Attributes:
        name: of the model.
        model: the model, with `watched` as its experts.
        watched: tells which experts are visited.
        wishes: what is measured.
        machine: where.
        tflop_per_s: that matrix products reach there.
    """

    name: str
    model: BenchModel
    watched: WatchedMoE
    wishes: PrefillWishes
    machine: Machine
    tflop_per_s: float

    def measure(self, prefilling: Prefilling, case: PrefillCase) -> PrefillRow:
        """All figures of a case, with a cache of its format that is long enough.

        Raises:
            NumericalError: logits are not finite.
        """
        loaded, kind, watched = self.model.loaded, prefilling.cache.kind, self.watched
        context, size = case.context, case.chunk_size
        watched.watching, watched.visited = True, []
        try:
            prefilling.take(context, size)
        finally:
            watched.watching = False
        prefilling.take(context, size)
        with undisturbed():
            taken, launched = zip(*(prefilling.take(context, size) for _ in range(self.wishes.chunks)), strict=True)
        flops = chunk_flops(loaded.spec, context, size)
        nbytes = step_bytes(loaded, kind.layout, [context + size], watched.visited)
        p50, floor = percentile(taken, 50), max(flops / self.tflop_per_s, nbytes / self.machine.read_tb_per_s) / 1e12
        return PrefillRow(
            shape=self.name,
            kv=case.kv.name,
            context=context,
            chunk_size=size,
            attention=kind.attention,
            weights=self.model.weights,
            chunks=len(taken),
            p50_ms=1000 * p50,
            max_ms=1000 * max(taken),
            host_ms=1000 * percentile(launched, 50),
            tokens_per_s=size / p50,
            flops=flops,
            bytes=nbytes,
            tflop_per_s=flops / p50 / 1e12,
            product_tflop_per_s=self.tflop_per_s,
            floor_ms=1000 * floor,
            share=floor / p50,
            profile=self._profile(prefilling, case) if self.wishes.profile else None,
        )

    def _profile(self, prefilling: Prefilling, case: PrefillCase) -> Profile:
        def take() -> None:
            prefilling.take(case.context, case.chunk_size)

        return replace(profile_step(take, take, self.model.loaded.device), of="eager")


def chunk_flops(spec: DecoderSpec, context: int, chunk_size: int) -> int:
    """Operations of all products of a chunk: of linear layers, of routers and the experts that its tokens visit (see
    `moe_flops`), of attention to the context and to the tokens before them in the chunk, and of the last token's
    scores."""
    attention, hidden = spec.attention, spec.hidden_size
    queries = attention.num_heads * attention.head_dim
    projected = queries + 2 * attention.num_kv_heads * attention.head_dim
    seen = chunk_size * context + chunk_size * (chunk_size + 1) // 2
    per_layer = linear_flops(chunk_size, hidden, projected) + linear_flops(chunk_size, queries, hidden)
    per_layer += attention_flops(1, attention.num_heads, attention.head_dim, seen)
    total = spec.num_layers * per_layer + linear_flops(1, hidden, spec.vocab_size)
    for block in spec.feed_forwards:
        width = block.intermediate_size
        if isinstance(block, MoESpec):
            total += moe_flops(chunk_size, hidden, width, block.router, block.shared_intermediate_size or 0)
        else:
            total += 3 * linear_flops(chunk_size, hidden, width)
    return total
