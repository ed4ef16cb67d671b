"""Carries out plans: copies first, then one pass of the decoder over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.engine.calibrate import Calibration
from subten.engine.layer_cache import layer_cache
from subten.engine.loading import LoadedModel
from subten.formats import PageLayout
from subten.kernels.attention import AttentionInputs, LayerCache, PagedAttention, PrefillRule
from subten.kvcache import AppendPlan, CacheStorage, CopyPlan
from subten.models.decoder import StepInputs


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: where its tokens go, and which they are."""

    plan: AppendPlan
    token_ids: Sequence[int]


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

    def copy(self, copies: CopyPlan) -> None:
        """Carry out copies that belong to no step (a fork, a snapshot, a prefix hit)."""
        self.storage.apply(copies)

    @torch.inference_mode()
    def run(self, batch: Sequence[Work], *, all_logits: bool = False) -> Tensor:
        """One step.

        Args:
            batch: at least one sequence, each with at least one token.
            all_logits: logits of every token instead of each sequence's last.

        Returns:
            float32 [tokens or batch, vocab].
        """
        for work in batch:
            self.storage.apply(work.plan.copies)
        inputs = self._inputs(batch)
        hidden = self._model.decoder.forward(inputs, self._attention)
        self._attention.finish(inputs.attention)
        if not all_logits:
            hidden = hidden[inputs.attention.query_start[1:].long() - 1]
        return self._model.decoder.logits(hidden)

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
