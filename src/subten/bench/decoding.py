"""Batches that decode over caches of a given length: the engine's own decode step, from a made up token on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from subten.bench.filled_cache import CacheKind, FilledCache
from subten.engine.calibrate import Calibration
from subten.engine.decode_rows import DecodeWork, Draw
from subten.engine.decode_step import Choice, Decoded
from subten.engine.graphs import GraphRecorder, Recorded, Recorder, Step, why_no_graphs
from subten.engine.loading import LoadedModel
from subten.engine.runner import Work
from subten.engine.sampling import SamplingParams
from subten.engine.usage import CacheUsage
from subten.errors import KernelUnavailableError, NumericalError
from subten.formats import PAGE_SIZE, PageLayout


class EagerRecorder:
    """Takes the step again wherever a graph would be replayed: the stand-in of a device that has no graphs."""

    def __call__(self, step: Step) -> Recorded:
        """Of this step."""
        logits, results = step()

        def again() -> None:
            for kept, new in zip((logits, results), step(), strict=True):
                kept.copy_(new)

        return Recorded(again, logits, results)


class Instruments:
    """Stands between a runner and its graphs: has the device measure them, or leaves them out.

    Args:
        recorder: what makes the graphs.
        device: where they run.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self._still = False

    def __call__(self, step: Step) -> Recorded:
        """Of this step."""
        recorded = self._recorder(step)
        return replace(recorded, replay=partial(self._replay, recorded.replay))

    def device_ms(self, steps: Callable[[], object]) -> list[float]:
        """What the device takes for each graph that is launched meanwhile; nothing where it is a CPU."""
        self._spans = []
        try:
            steps()
            spans = self._spans
        finally:
            self._spans = None
        if not spans:
            return []
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in spans]

    def without_graphs(self, steps: Callable[[], object]) -> None:
        """Graphs that are launched meanwhile do nothing. What rows hold is wrong behind it: begin another batch."""
        self._still = True
        try:
            steps()
        finally:
            self._still = False

    def _replay(self, replay: Callable[[], object]) -> None:
        if self._still:
            return
        if self._spans is None or self._device.type != "cuda":
            replay()
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        self._spans.append((start, end))


class Decoding:
    """A model with a cache of one kind.

    Args:
        model: the model.
        kind: of the cache.
        batches: numbers of sequences that it will decode; there is room for the largest.
        calibration: how the format codes.
        params: how tokens are chosen.

    Raises:
        CacheMemoryError: the device has no room for it.
        KernelUnavailableError: a step can't be captured on this GPU.
    """

    def __init__(
        self,
        model: LoadedModel,
        kind: CacheKind,
        batches: Sequence[int],
        calibration: Calibration | None,
        params: SamplingParams,
    ) -> None:
        obstacle = why_no_graphs(model.device, model.kernels, kind.choice, bool(model.spec.expert_sizes))
        if model.device.type == "cuda" and obstacle is not None:
            raise KernelUnavailableError(f"a decode step can't be a CUDA graph: {obstacle}")
        recorder: Recorder = GraphRecorder(model.device) if model.device.type == "cuda" else EagerRecorder()
        self.instruments = Instruments(recorder, model.device)
        self._model, self._kind = model, kind
        self._cache = FilledCache(model, kind, max(batches), calibration)
        self._books, self._runner = self._cache.books, self._cache.runner
        self._runner.decode_step.capture(self.instruments, batches, [Choice.of([params])])
        self._draw, self._batches = Draw(params, 0), frozenset(batches)
        self._sequences: list[int] = []
        self._tokens: list[int] = []

    def begin(self, batch: int, steps: int) -> None:
        """So many new sequences, the longest of which has room for so many steps; others are up to a page shorter, so
        that they do not all need their next page in the same step. Each begins with another random token."""
        assert batch in self._batches, "its step was not captured"
        for sequence in self._sequences:
            self._books.free(sequence)
        self._sequences = []
        for row in range(batch):
            length = self._kind.context - steps - row * PAGE_SIZE // batch
            self._sequences.append(self._cache.open(length))
        self._tokens = torch.randint(self._model.spec.vocab_size, (batch,)).tolist()

    def works(self) -> list[DecodeWork]:
        """The next step's, entered into the books."""
        return [
            DecodeWork(sequence, self._books.append(sequence, [token]), token, self._draw)
            for sequence, token in zip(self._sequences, self._tokens, strict=True)
        ]

    def decode(self, works: Sequence[DecodeWork]) -> Decoded:
        """A step, whose tokens the next one takes up.

        Raises:
            NumericalError: logits are not finite.
        """
        decoded = self._runner.decode(works)
        self._tokens = decoded.token_ids
        if not all(decoded.finite):
            raise NumericalError("the logits of these weights are not finite")
        return decoded

    def steps(self, count: int) -> None:
        """Take so many."""
        for _ in range(count):
            self.decode(self.works())

    def take_eagerly(self) -> None:
        """A step kernel by kernel, as a pass of the runner, up to the logits."""
        self._runner.run([Work(work.plan, [work.token_id]) for work in self.works()])

    @property
    def usage(self) -> CacheUsage:
        """What the sequences hold now, of the memory that was allocated."""
        geometry, lengths = self._model.geometry, self.lengths
        held = self._books.held_pages() * self._kind.layout.page_bytes(geometry)
        held += len(lengths) * self._kind.layout.window_bytes(geometry)
        elements = geometry.elements(sum(lengths))
        return CacheUsage(sum(lengths), elements, held, 2 * elements)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self._books.lengths()

    @property
    def layout(self) -> PageLayout:
        """Of the cache's pages."""
        return self._kind.layout
