"""The decode step: one token for each of some sequences, from device memory to device memory.

Everything from the token to the next one is a function of what lies in `DecodeRows` and in the cache. So a CUDA graph
can hold it: one for each number of rows (see `graphs`) and each way of choosing tokens. The host launches it and
waits for two numbers per sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from subten.engine.decode_rows import DecodeRows, DecodeWork
from subten.engine.drawing import choose
from subten.engine.graphs import Recorded, Recorder
from subten.engine.sampling import SamplingParams
from subten.kernels.attention import PagedAttention
from subten.kernels.launches import padded
from subten.models.decoder import Decoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """How a step chooses tokens: whether some row draws with noise, and whether some row's tokens are ranked."""

    noise: bool
    ranked: bool

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> Choice:
        """The least that serves all rows."""
        noisy = [params for params in rows if not params.greedy]
        return cls(bool(noisy), any(params.ranked for params in noisy))


CHOICES = (Choice(noise=False, ranked=False), Choice(noise=True, ranked=False), Choice(noise=True, ranked=True))
"""All that `Choice.of` gives."""


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


class DecodeStep:
    """Takes decode steps, one at a time.

    Args:
        decoder: of the model.
        attention: over the cache.
        rows: memory of the batch.
    """

    def __init__(self, decoder: Decoder, attention: PagedAttention, rows: DecodeRows) -> None:
        self._decoder, self._attention, self._rows = decoder, attention, rows
        self._recorded: dict[tuple[int, Choice], Recorded] = {}

    @property
    def graphs(self) -> int:
        """Graphs that steps are launched with; none means that they are launched kernel by kernel."""
        return len(self._recorded)

    @torch.inference_mode()
    def capture(self, record: Recorder, counts: Collection[int], choices: Sequence[Choice] = CHOICES) -> None:
        """Record the steps of so many sequences each, which is as many rows as `padded` says; others are launched
        kernel by kernel. Nobody is in any row while it does: nothing is read from the cache, nothing written to it.
        """
        self._rows.forget()
        # The largest come first: their memory then serves the others.
        for size in sorted({padded(count) for count in counts}, reverse=True):
            for choice in choices:
                self._recorded[size, choice] = record(partial(self._take, size, choice))
        log.info("captured %d decode steps of up to %d sequences", self.graphs, max(counts))

    @torch.inference_mode()
    def run(self, works: Sequence[DecodeWork]) -> Decoded:
        """A step of these sequences, and what came of it."""
        count, choice = len(works), Choice.of(work.draw.params for work in works)
        recorded = self._recorded.get((padded(count), choice))
        try:
            self._rows.place(works)
            if recorded is None:
                logits, results = self._take(count, choice)
            else:
                recorded.replay()
                logits, results = recorded.logits, recorded.results
        except RuntimeError:
            self._rows.forget()
            raise
        # All of them in one copy: a part would be put together on the device first.
        tokens, finite = (row[:count] for row in results.tolist())
        self._rows.moved_on(tokens)
        return Decoded(tokens, [bool(fine) for fine in finite], logits[:count])

    def _take(self, count: int, choice: Choice) -> tuple[Tensor, Tensor]:
        """One step of the first rows; returns logits, and int64 [2, rows]: tokens, and whether logits are finite."""
        rows = self._rows
        inputs = rows.inputs(count)
        hidden = self._decoder.forward(inputs, self._attention)
        self._attention.finish(inputs.attention)
        logits = self._decoder.logits(hidden)
        knobs = rows.knobs(count, ranked=choice.ranked)
        tokens = choose(logits, knobs, inputs.positions + 1, noise=choice.noise)
        rows.move_on(count, tokens)
        return logits, torch.stack([tokens, torch.isfinite(logits).all(-1).long()])
