"""The decode step: one token for each of some sequences, from device memory to device memory.

Everything from the token to the next one is a function of what lies in `DecodeRows` and in the cache. So a CUDA graph
can hold it: one graph for each number of rows, and each way of choosing tokens. The host launches it and waits for a
few numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.engine.decode_rows import DecodeRows, DecodeWork
from subten.engine.drawing import choose
from subten.kernels.attention import PagedAttention
from subten.models.decoder import Decoder

_log = logging.getLogger(__name__)
_EXACT_SIZES = 8
"""Up to so many rows every number has a graph of its own; beyond, multiples of four: rows that fill up a batch cost
little, but their token's experts are read as well."""


@dataclass(frozen=True)
class Choice:
    """How a step chooses tokens: whether some row draws with noise, and whether some row's tokens are ranked."""

    noise: bool
    ranked: bool

    @classmethod
    def of(cls, works: Sequence[DecodeWork]) -> Choice:
        """The least that serves all rows."""
        noisy = [work.draw.params for work in works if not work.draw.params.greedy]
        return cls(bool(noisy), any(params.top_k > 0 or params.top_p < 1 for params in noisy))


CHOICES = (Choice(noise=False, ranked=False), Choice(noise=True, ranked=False), Choice(noise=True, ranked=True))


@dataclass(frozen=True)
class Decoded:
    """What came of a step, a row for each sequence.

    Attributes:
        token_ids: the next tokens.
        finite: whether a row's logits are numbers; where they are not its token means nothing.
        logits: float32 [rows, vocab], valid up to the next step.
    """

    token_ids: list[int]
    finite: list[bool]
    logits: Tensor


@dataclass(frozen=True)
class _Captured:
    """A graph, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    results: Tensor


class DecodeStep:
    """Takes decode steps, one at a time.

    Args:
        decoder: of the model.
        attention: over the cache.
        rows: memory of the batch.
        max_pages: of one sequence.
    """

    def __init__(self, decoder: Decoder, attention: PagedAttention, rows: DecodeRows, max_pages: int) -> None:
        self._decoder, self._attention, self._rows, self._max_pages = decoder, attention, rows, max_pages
        self._captured: dict[tuple[int, Choice], _Captured] = {}
        self._under_way: tuple[int, Tensor, Tensor] | None = None

    @property
    def captured(self) -> int:
        """Graphs that a step can be launched with; none means that steps are launched kernel by kernel."""
        return len(self._captured)

    @torch.inference_mode()
    def capture(self, max_batch: int) -> None:
        """Make the graphs of up to so many rows. Nothing is read or written but rows that nobody is in."""
        self._rows.forget()
        stream = torch.cuda.Stream()
        for size in reversed(sizes(max_batch)):
            for choice in CHOICES:
                stream.wait_stream(torch.cuda.current_stream())
                # Compiling and choosing algorithms can't be captured.
                with torch.cuda.stream(stream):
                    self._take(size, self._max_pages, choice)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                pool = next((other.graph.pool() for other in self._captured.values()), None)
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits, results = self._take(size, self._max_pages, choice)
                self._captured[size, choice] = _Captured(graph, logits, results)
        torch.cuda.synchronize()
        _log.info("captured %d decode steps of up to %d sequences", self.captured, max_batch)

    @torch.inference_mode()
    def launch(self, works: Sequence[DecodeWork]) -> None:
        """Begin a step; on a GPU it goes on while the host does something else, which ends with `result`."""
        choice, count = Choice.of(works), len(works)
        captured = self._captured.get((padded(count), choice))
        try:
            self._rows.place(works)
            if captured is None:
                pages = max(1, *(len(work.plan.block_table) for work in works))
                logits, results = self._take(count, pages, choice)
            else:
                captured.graph.replay()
                logits, results = captured.logits, captured.results
        except RuntimeError:
            self._rows.forget()
            raise
        self._under_way = count, logits, results

    def result(self) -> Decoded:
        """Wait for the step and have what came of it."""
        assert self._under_way is not None, "a step is under way"
        count, logits, results = self._under_way
        self._under_way = None
        tokens, finite = results[:, :count].tolist()
        self._rows.moved_on(tokens)
        return Decoded(tokens, [bool(fine) for fine in finite], logits[:count])

    def _take(self, count: int, pages: int, choice: Choice) -> tuple[Tensor, Tensor]:
        """One step of the first rows; returns logits, and int64 [2, rows]: tokens, and whether logits are finite."""
        rows = self._rows
        inputs = rows.inputs(count, pages)
        hidden = self._decoder.forward(inputs, self._attention)
        self._attention.finish(inputs.attention)
        logits = self._decoder.logits(hidden)
        knobs = rows.knobs(count, ranked=choice.ranked)
        tokens = choose(logits, knobs, inputs.positions + 1, noise=choice.noise)
        rows.move_on(count, tokens)
        return logits, torch.stack([tokens, torch.isfinite(logits).all(-1).long()])


def sizes(max_batch: int) -> list[int]:
    """Rows that graphs are made for."""
    return sorted({padded(count) for count in range(1, max_batch + 1)})


def padded(count: int) -> int:
    """Rows of the graph that serves so many sequences."""
    return count if count <= _EXACT_SIZES else -(-count // 4) * 4
