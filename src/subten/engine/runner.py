"""Carries out plans: copies, then a pass of the decoder over a ragged batch, whole or some layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.engine.calibrate import Calibration
from subten.engine.decode_rows import DecodeRows, DecodeWork
from subten.engine.decode_step import Decoded, DecodeStep
from subten.engine.graphs import Recorder
from subten.engine.layer_cache import layer_cache
from subten.engine.loading import LoadedModel
from subten.formats import PageLayout
from subten.kernels.attention import AttentionInputs, LayerCache, PagedAttention, PrefillRule
from subten.kernels.launches import padded, sizes
from subten.kvcache import AppendPlan, CacheStorage, CopyPlan
from subten.models.decoder import Decoder, StepInputs

LOGITS_AT_A_TIME = 256
"""Tokens whose logits are in memory at a time, where all are asked for: with a large vocabulary, those of a chunk of
1024 would take more than a layer does."""


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: where its tokens go, and which they are."""

    plan: AppendPlan
    token_ids: Sequence[int]


class Pass:
    """One step on its way through the layers.

    Args:
        decoder: of the model.
        attention: over the cache.
        inputs: of the step.
    """

    def __init__(self, decoder: Decoder, attention: PagedAttention, inputs: StepInputs) -> None:
        self._decoder, self._attention, self._inputs = decoder, attention, inputs
        self._next = 0
        with torch.inference_mode():
            self._hidden = decoder.embed(inputs)

    @property
    def layers_left(self) -> int:
        """Layers that are still to be computed."""
        return self._decoder.spec.num_layers - self._next

    @torch.inference_mode()
    def advance(self, layers: int) -> None:
        """Compute the next `layers` layers, or as many as are left."""
        taken = range(self._next, self._next + min(layers, self.layers_left))
        self._hidden = self._decoder.layers(self._hidden, self._inputs, self._attention, taken)
        self._next = taken.stop
        if not self.layers_left:
            self._attention.finish(self._inputs.attention)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """float32 [sequences, vocab] of each sequence's last token; once no layer is left."""
        return self._decoder.logits(self._hidden[self._inputs.attention.query_start[1:].long() - 1])

    def all_logits(self, first: int, end: int) -> Iterator[Tensor]:
        """float32 [n, vocab] of tokens `first` to `end` of the step, `LOGITS_AT_A_TIME` at most; once no layer is
        left."""
        for start in range(first, end, LOGITS_AT_A_TIME):
            with torch.inference_mode():
                logits = self._decoder.logits(self._hidden[start : min(start + LOGITS_AT_A_TIME, end)])
            yield logits


class Runner:
    """A model, a cache's memory, and nothing that decides anything.

    Args:
        model: the model.
        layout: page layout of the cache's format.
        num_pages: pages to allocate.
        num_windows: window slots to allocate.
        calibration: of the model; needed where the format is a calibrated one.
        rule: what a prefill sees of its own chunk.
        attention: makes the attention over the cache.
        max_batch: sequences of one decode step.
        max_context: tokens of one sequence.
        record: captures decode steps of all sizes; None leaves them as they are.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: PageLayout,
        num_pages: int,
        num_windows: int,
        calibration: Calibration | None,
        rule: PrefillRule,
        attention: Callable[[Sequence[LayerCache]], PagedAttention],
        max_batch: int,
        max_context: int,
        record: Recorder | None = None,
    ) -> None:
        self._model = model
        self._rule = rule
        self.storage = CacheStorage(layout, model.geometry, num_pages, num_windows, model.device)
        self._attention = attention(
            [
                layer_cache(model, index, self.storage.layer(index), layout, calibration)
                for index in range(model.geometry.num_layers)
            ]
        )
        max_pages = max(1, layout.pages_for(max_context))
        rows = DecodeRows(padded(max_batch), max_pages, rule, model.device)
        self.decode_step = DecodeStep(model.decoder, self._attention, rows)
        if record is not None:
            self.decode_step.capture(record, sizes(max_batch))

    def decode(self, batch: Sequence[DecodeWork]) -> Decoded:
        """One token of each of some sequences, and the choice of the next."""
        for work in batch:
            if work.plan.copies.pages:
                self.storage.apply(work.plan.copies)
        return self.decode_step.run(batch)

    def copy(self, copies: CopyPlan) -> None:
        """Carry out copies that belong to no step (a fork, a snapshot, a prefix hit)."""
        self.storage.apply(copies)

    @torch.inference_mode()
    def run(self, batch: Sequence[Work]) -> Tensor:
        """One step.

        Args:
            batch: at least one sequence, each with at least one token.

        Returns:
            float32 [batch, vocab], logits of each sequence's last token.
        """
        step = self.begin(batch)
        step.advance(step.layers_left)
        return step.logits()

    def begin(self, batch: Sequence[Work]) -> Pass:
        """A step that has its copies made and no layer computed yet. Between its layers other steps may run, of other
        sequences."""
        for work in batch:
            self.storage.apply(work.plan.copies)
        return Pass(self._model.decoder, self._attention, self._inputs(batch))

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that the time it took can be measured."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _inputs(self, batch: Sequence[Work]) -> StepInputs:
        device = self._model.device
        starts = [0]
        tokens: list[int] = []
        positions: list[int] = []
        for work in batch:
            tokens += work.token_ids
            context = work.plan.context_len
            positions += range(context, context + work.plan.new_tokens)
            starts.append(len(tokens))
        width = max(1, max(len(work.plan.block_table) for work in batch))
        tables = [[*w.plan.block_table, *[0] * (width - len(w.plan.block_table))] for w in batch]

        def int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return StepInputs(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            attention=AttentionInputs(
                query_start=int32(starts),
                context_len=int32([work.plan.context_len for work in batch]),
                block_table=int32(tables),
                window_slot=int32([work.plan.window_slot for work in batch]),
                rule=self._rule,
            ),
        )
