"""What a decode step reads, in device memory: a row for each sequence, which the step itself moves on.

The host writes only what it knows better: a sequence that is new to its row, a page that was added, a token that was
chosen in another way. Where nothing of that happens it writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.engine.drawing import UNLIMITED, Knobs
from subten.engine.sampling import SamplingParams, knobs_of
from subten.kernels.attention import AttentionInputs, PrefillRule
from subten.kvcache import AppendPlan
from subten.models.decoder import StepInputs

NO_SLOT = -1
"""As a window slot: nobody is in this row. It fills up a batch; nothing is read or written for it."""


@dataclass(frozen=True)
class Draw:
    """How the tokens of one request are drawn; one object for all its steps."""

    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class DecodeWork:
    """One sequence's part of a decode step.

    Attributes:
        sequence: in the cache's books; another number for the same request once it has lost its pages in between.
        plan: where the token goes.
        token_id: the token.
        draw: how the next one is drawn.
    """

    sequence: int
    plan: AppendPlan
    token_id: int
    draw: Draw


@dataclass
class _Held:
    """What a row of device memory holds, or will once the step that is under way is done."""

    sequence: int
    draw: Draw
    token_id: int
    context_len: int
    pages: int


class DecodeRows:
    """Rows on the device, and what the host knows of them.

    Args:
        count: rows.
        max_pages: of one sequence.
        rule: what a prefill sees of its own chunk; a decode step does not depend on it.
        device: where.
    """

    def __init__(self, count: int, max_pages: int, rule: PrefillRule, device: torch.device) -> None:
        self._rule = rule
        pinned = device.type == "cuda"

        def both(*size: int, dtype: torch.dtype, value: float = 0) -> tuple[Tensor, Tensor]:
            return (
                torch.full(size, value, dtype=dtype, pin_memory=pinned),
                torch.full(size, value, dtype=dtype, device=device),
            )

        self._host_tokens, self.token_ids = both(count, dtype=torch.int64)
        self._host_positions, self.positions = both(count, dtype=torch.int64)
        self._host_context, self.context_len = both(count, dtype=torch.int32)
        self._host_slots, self._slots = both(count, dtype=torch.int32, value=NO_SLOT)
        self._host_table, self._table = both(count, max_pages, dtype=torch.int32)
        self._query_start = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._knobs = Knobs(
            temperature=torch.zeros(count, device=device),
            floor=torch.full((count,), -torch.inf, device=device),
            top_k=torch.full((count,), UNLIMITED, device=device),
            top_p=torch.ones(count, dtype=torch.float64, device=device),
            seed=torch.zeros(count, dtype=torch.int64, device=device),
            ranked=False,
        )
        self._held: list[_Held | None] = [None] * count

    def place(self, works: Sequence[DecodeWork]) -> None:
        """Make the first rows those of a step, and leave the others empty."""
        drawn, moved = [], False
        for row, work in enumerate(works):
            plan, held = work.plan, self._held[row]
            if held is None or held.sequence != work.sequence or held.draw is not work.draw or plan.copies.pages:
                drawn.append((row, work.draw))
                held = self._held[row] = _Held(work.sequence, work.draw, -1, -1, 0)
            if held.token_id != work.token_id or held.context_len != plan.context_len:
                moved = True
                held.token_id, held.context_len = work.token_id, plan.context_len
            if held.pages != len(plan.block_table):
                self._write_pages(row, held.pages, plan.block_table)
                held.pages = len(plan.block_table)
        left = [row for row in range(len(works), len(self._held)) if self._held[row] is not None]
        for row in left:
            self._held[row] = None
        if drawn:
            self._write_knobs(drawn)
        if drawn or left:
            self._write_slots(works)
        if moved:
            self._write_tokens(works)

    def moved_on(self, token_ids: Sequence[int]) -> None:
        """The step is done; these are the tokens that the rows now hold."""
        for held, token in zip(self._held, token_ids, strict=False):
            assert held is not None, "a step's rows are held"
            held.token_id = token
            held.context_len += 1

    def forget(self) -> None:
        """Nothing is known any more of what the rows hold."""
        self._held = [None] * len(self._held)
        self._host_slots.fill_(NO_SLOT)
        self._slots.copy_(self._host_slots, non_blocking=True)

    def inputs(self, count: int) -> StepInputs:
        """Of the first rows, as views. All have room for the longest context, so that how attention is split, and
        with it how its sums are rounded, does not change while a sequence grows."""
        return StepInputs(
            self.token_ids[:count],
            self.positions[:count],
            AttentionInputs(
                query_start=self._query_start[: count + 1],
                context_len=self.context_len[:count],
                block_table=self._table[:count],
                window_slot=self._slots[:count],
                rule=self._rule,
            ),
        )

    def move_on(self, count: int, token_ids: Tensor) -> None:
        """Part of a step: the first rows' next tokens take the place of the last ones, one position on. Rows that
        nobody is in stay where they are, all with the same token."""
        taken = self._slots[:count] >= 0
        torch.mul(token_ids, taken, out=self.token_ids[:count])
        self.positions[:count].add_(taken)
        self.context_len[:count].add_(taken)

    def knobs(self, count: int, *, ranked: bool) -> Knobs:
        """Of the first rows, as views."""
        return self._knobs.first(count, ranked=ranked)

    def _write_pages(self, row: int, start: int, pages: Sequence[int]) -> None:
        part = slice(start, len(pages))
        self._host_table[row, part] = torch.tensor(pages[part], dtype=torch.int32)
        self._table[row, part].copy_(self._host_table[row, part], non_blocking=True)

    def _write_slots(self, works: Sequence[DecodeWork]) -> None:
        slots = [work.plan.window_slot for work in works]
        self._host_slots.fill_(NO_SLOT)
        self._host_slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self._slots.copy_(self._host_slots, non_blocking=True)

    def _write_tokens(self, works: Sequence[DecodeWork]) -> None:
        count = len(works)
        contexts = torch.tensor([work.plan.context_len for work in works])
        self._host_tokens[:count] = torch.tensor([work.token_id for work in works])
        self._host_positions[:count] = contexts
        self._host_context[:count] = contexts
        for device, host in (
            (self.token_ids, self._host_tokens),
            (self.positions, self._host_positions),
            (self.context_len, self._host_context),
        ):
            device[:count].copy_(host[:count], non_blocking=True)

    def _write_knobs(self, drawn: Sequence[tuple[int, Draw]]) -> None:
        rows = torch.tensor([row for row, _ in drawn], device=self._slots.device)
        new = knobs_of([(draw.params, draw.seed) for _, draw in drawn], self._slots.device)
        for name in ("temperature", "floor", "top_k", "top_p", "seed"):
            getattr(self._knobs, name).index_copy_(0, rows, getattr(new, name))
