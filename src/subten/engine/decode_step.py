"""The decode step: one token for each of some sequences, from device memory to device memory.

Everything from the token to the next one is a function of what lies in `DecodeRows` and in the cache. The host
launches it and waits for two numbers per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.engine.decode_rows import DecodeRows, DecodeWork
from subten.engine.drawing import choose
from subten.kernels.attention import PagedAttention
from subten.models.decoder import Decoder


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

    @torch.inference_mode()
    def run(self, works: Sequence[DecodeWork]) -> Decoded:
        """A step of these sequences, and what came of it."""
        count, pages = len(works), max(1, *(len(work.plan.block_table) for work in works))
        try:
            self._rows.place(works)
            logits, results = self._take(count, pages, Choice.of(works))
        except RuntimeError:
            self._rows.forget()
            raise
        tokens, finite = results.tolist()
        self._rows.moved_on(tokens)
        return Decoded(tokens, [bool(fine) for fine in finite], logits)

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
