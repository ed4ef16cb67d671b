"""The engine's loop: one step for all that decode, then the prompts of those that do not yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from subten.engine.decode_step import Decoded
from subten.engine.logprobs import TokenLogprobs, token_logprobs
from subten.engine.pacing import Pacer
from subten.engine.request import Request
from subten.engine.runner import Pass, Runner
from subten.engine.sampling import SampleRow, sample
from subten.engine.scheduler import Batch, DecodeBatch, Scheduler
from subten.errors import CacheMemoryError, GuardError, NumericalError

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


class EngineLoop:
    """Requests in, tokens out. It belongs to one thread.

    Args:
        runner: what computes.
        scheduler: what decides.
        pacer: how much of a prompt goes between two decode steps.
        snapshots: keep the state at the end of prompts and answers for prompts that continue them.
        before_release: called before a finished or cancelled request's part of the cache is freed.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        pacer: Pacer,
        snapshots: bool,
        before_release: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._pacer = pacer
        self._snapshots = snapshots
        self._before_release = before_release
        self._prefill: tuple[Batch, Pass] | None = None
        """Chunks on their way through the layers."""
        self._last_tokens = 0.0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request; `request.branches` begin where its prompt has been computed."""
        self._scheduler.add(request)

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """Continue one request several times.

        Their prompts are the parent's tokens so far. While the parent has its part of the cache they share it, each
        page until one of them writes to it; where there is no room for that they wait, and are computed on their own.
        """
        for child in children:
            if not parent.output and parent.finish_reason is None:
                parent.branches.append(child)
            elif not (_continues(parent) and self._scheduler.fork(parent, child)):
                self._scheduler.add(child)

    def cancel(self, request: Request) -> None:
        """End a request now and free its part of the cache; what branches off its prompt goes on."""
        request.cancel()
        if self._prefill is not None and request in _requests(self._prefill[0]):
            self._prefill = None
        if request.sequence is not None:
            self._before_release()
        self._scheduler.remove(request)
        branches, request.branches = [b for b in request.branches if b.finish_reason is None], []
        if branches:
            branches[0].branches += branches[1:]  # It may have some of its own: forks of an answer not begun yet.
            self._scheduler.add(branches[0])

    def step(self) -> None:
        """A token for every request that decodes; then, of the prompts, as much as fits in before the next token."""
        self._scheduler.admit()
        pinned = [] if self._prefill is None else _requests(self._prefill[0])
        batch = self._scheduler.decode_batch(pinned)
        if batch:
            start = perf_counter()
            self._run_decode(batch)
            self._last_tokens = perf_counter()
            self._pacer.decoded(self._last_tokens - start)
        self._run_prefill(paced=bool(batch) and self._pacer.budget is not None)
        if finished := self._scheduler.finished():
            self._before_release()
            for request in finished:
                self._scheduler.remove(request)

    def _run_decode(self, batch: DecodeBatch) -> None:
        try:
            decoded = self._runner.decode([work for _, work in batch])
        except RuntimeError as error:
            self._recover(_requests(batch), error)
        else:
            self._take_decoded(batch, decoded)

    def _take_decoded(self, batch: DecodeBatch, decoded: Decoded) -> None:
        """What the step has chosen goes to those whose token depends on nothing else; the others' is chosen here."""
        others: list[tuple[int, Request]] = []
        for row, (request, _) in enumerate(batch):
            if not request.ready:
                continue
            if decoded.finite[row] and request.simple:
                self._take(request, decoded.token_ids[row], None)
            else:
                others.append((row, request))
        if others:
            self._choose(others, decoded.logits)

    def _run_prefill(self, *, paced: bool) -> None:
        """Take one step's prompts through the layers; with a budget, as many layers of as many steps as fit in."""
        room = 1
        while room > 0:
            begun = self._prefill is None
            # Of what may be left in the middle, one prompt at a time: a cancelled one can then be dropped at once.
            if begun and not self._begin_prefill(most=1 if paced else None):
                return
            if not paced:
                self._advance_prefill(None)
                return
            # What a layer takes depends on what lies in the cache before the chunk: the first one shows it.
            self._advance_prefill(1 if begun else max(1, self._room()))
            room = self._room()

    def _room(self) -> int:
        """Layers that fit in before the next token of those that decode."""
        return self._pacer.layers(perf_counter() - self._last_tokens)

    def _begin_prefill(self, most: int | None) -> bool:
        batch = self._scheduler.prefill_batch(most)
        if batch:
            try:
                self._prefill = batch, self._runner.begin([work for _, work in batch])
            except RuntimeError as error:
                self._recover(_requests(batch), error)
        return self._prefill is not None

    def _advance_prefill(self, layers: int | None) -> None:
        assert self._prefill is not None, "a prefill has begun"
        batch, step = self._prefill
        layers = step.layers_left if layers is None else min(layers, step.layers_left)
        logits = None
        try:
            with self._measured(lambda seconds: self._pacer.prefilled(layers, seconds)):
                step.advance(layers)
            if not step.layers_left:
                with self._measured(self._pacer.ended):
                    logits = self._prompt_logits(batch, step)
        except RuntimeError as error:
            self._prefill = None
            self._recover(_requests(batch), error)
            return
        if logits is not None:
            self._prefill = None
            self._take_tokens(batch, logits)

    @contextmanager
    def _measured(self, learn: Callable[[float], None]) -> Iterator[None]:
        """With a budget, how long something takes on the device."""
        start = perf_counter()
        yield
        if self._pacer.budget is not None:
            self._runner.synchronize()
            learn(perf_counter() - start)

    def _prompt_logits(self, batch: Batch, step: Pass) -> Tensor:
        """Of each sequence's last token; where somebody asked for the others, they are reported."""
        first = 0
        for request, work in batch:
            end, position = first + len(work.token_ids), work.plan.context_len
            if request.params.prompt_logprobs is not None:
                for logits in step.all_logits(first, end):
                    request.take_prompt(position, position + len(logits), logits)
                    position += len(logits)
            first = end
        return step.logits()

    def _recover(self, requests: Sequence[Request], error: RuntimeError) -> None:
        """After a step that ran out of memory: its longest request fails, the others are computed again.

        Raises:
            RuntimeError: the error, if it is another one.
        """
        if not isinstance(error, torch.OutOfMemoryError) and not any(w in str(error) for w in _MEMORY_WORDS):
            raise error
        longest = max(requests, key=lambda request: request.length)
        longest.fail(
            CacheMemoryError("the device's memory did not suffice for the request; shorten it, or the batch")
        )
        for request in requests:
            if request is longest:
                self._scheduler.remove(request)
            else:
                self._scheduler.restart(request)

    def _take_tokens(self, batch: Batch, logits: Tensor) -> None:
        ready = self._with_branches(batch)
        if ready:
            self._choose(ready, logits)

    def _choose(self, ready: Sequence[tuple[int, Request]], logits: Tensor) -> None:
        """Give requests the tokens that their rows of the logits decide. One whose numbers or whose guard are no good
        fails alone."""
        rows = logits[[row for row, _ in ready]]
        finite = torch.isfinite(rows).all(-1).tolist()
        going: list[tuple[int, Request, SampleRow]] = []
        for index, (_, request) in enumerate(ready):
            if not finite[index]:
                request.fail(
                    NumericalError("the model's logits are not finite for this request; its weights are damaged")
                )
                continue
            try:
                going.append((index, request, request.sample_row()))
            except GuardError as error:
                request.fail(error)
        if not going:
            return
        rows = rows[[index for index, _, _ in going]]
        tokens = sample(rows, [wanted for _, _, wanted in going]).tolist()
        reports = token_logprobs(rows, tokens, [request.params.logprobs for _, request, _ in going])
        for (_, request, wanted), token, logprobs in zip(going, tokens, reports, strict=True):
            if wanted.permits(token):
                self._take(request, token, logprobs)
            else:
                request.fail(
                    GuardError("the form that was asked for can't go on from here with any token of this model")
                )

    def _take(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        try:
            request.take(token, logprobs)
        except GuardError as error:
            request.fail(error)
            return
        if self._snapshots and (len(request.output) == 1 or request.finish_reason is not None):
            self._scheduler.snapshot(request)

    def _with_branches(self, batch: Batch) -> list[tuple[int, Request]]:
        """The requests whose next token the step decides, each with its row; what branches off a prompt that is now
        done takes its first token from the same row."""
        ready = [(row, request) for row, (request, _) in enumerate(batch) if request.ready]
        for row, request in ready:  # It grows on the way: a branch may have branches.
            branches, request.branches = request.branches, []
            for branch in branches:
                if branch.finish_reason is not None:
                    continue
                if self._scheduler.fork(request, branch):
                    branch.prompt_logprobs = request.prompt_logprobs
                    ready.append((row, branch))
                else:
                    self._scheduler.add(branch)
        return ready


def _continues(request: Request) -> bool:
    """Whether all but the newest of a request's tokens, and no others, are in its part of the cache."""
    return request.sequence is not None and request.cached + 1 == request.length


def _requests(batch: Batch | DecodeBatch) -> list[Request]:
    return [request for request, _ in batch]
