"""Which requests have a part of the cache, and which take part in the next step, with how many tokens."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from subten.engine.decode_rows import DecodeWork
from subten.engine.memory import reserved_pages
from subten.engine.request import Request
from subten.engine.runner import Work
from subten.errors import CacheMemoryError
from subten.formats import PageLayout
from subten.kvcache import AppendPlan, CacheBooks, CacheStorage

_BY_ARRIVAL = attrgetter("arrival")

Batch = Sequence[tuple[Request, Work]]
"""A step of prompts: each request with its work."""
DecodeBatch = Sequence[tuple[Request, DecodeWork]]
"""A decode step, likewise."""


@dataclass(frozen=True)
class Policy:
    """What a scheduler goes by.

    Attributes:
        max_batch: requests that have a part of the cache at a time.
        chunk_size: prompt tokens of one step. A prompt is cut at multiples of it, whatever else runs, so that a
            result does not depend on company.
        reuse: whether a prompt begins on what the cache holds of it.
        reserve: tokens beyond its present length for which a request has pages set aside when others are admitted;
            None is its longest answer.
    """

    max_batch: int
    chunk_size: int
    reuse: bool
    reserve: int | None


class Scheduler:
    """First come, first served.

    A request is admitted once the pages that it and all running ones may still need (`Policy.reserve`) are free or
    held by snapshots alone. Where the longest answers are set aside, no running request ever waits for memory. Where
    less is, one that outgrows the pool takes the pages of the youngest: that one's bytes are saved in host memory
    (`preempt`) and put back later, so that its answer is the same as without.
    """

    def __init__(self, books: CacheBooks, storage: CacheStorage, layout: PageLayout, policy: Policy) -> None:
        self._books = books
        self._storage = storage
        self._layout = layout
        self._policy = policy
        self._waiting: list[Request] = []  # both by arrival
        self._running: list[Request] = []
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Requests that have no part of the cache yet, or for now."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a part of the cache."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request, by its arrival."""
        insort(self._waiting, request, key=_BY_ARRIVAL)

    def admit(self) -> None:
        """Give a part of the cache to those that wait, as far as it goes; one that has all of it for itself and still
        not enough fails."""
        while self._waiting and len(self._running) < self._policy.max_batch:
            request = self._waiting[0]
            if self._running and not self._fits(request):
                break
            try:
                self._enter(request)
            except CacheMemoryError as error:
                if self._running:
                    break
                request.fail(error)
            else:
                insort(self._running, request, key=_BY_ARRIVAL)
            del self._waiting[0]

    def decode_batch(self, pinned: Collection[Request]) -> DecodeBatch:
        """One token of every request whose prompt is done.

        Args:
            pinned: requests in the middle of a prompt's step, whose part of the cache has to stay where it is.
        """
        batch: list[tuple[Request, DecodeWork]] = []
        for request in [r for r in self._running if not r.prefilling and r not in pinned]:
            token = request.token(request.cached)
            plan = self._append(request, (token,), pinned)
            if plan is not None:
                assert request.sequence is not None, "a request that has room has a sequence"
                batch.append((request, DecodeWork(request.sequence, plan, token, request.draw)))
                request.cached += 1
        return batch

    def prefill_batch(self, most: int | None) -> Batch:
        """The next chunks of the prompts that came first: of up to `most` prompts, up to `chunk_size` tokens."""
        size = room = self._policy.chunk_size
        chosen: list[tuple[Request, int]] = []
        for request in self._running:
            end = min(len(request.prompt), (request.cached // size + 1) * size)
            if request.prefilling and end - request.cached <= room and (most is None or len(chosen) < most):
                room -= end - request.cached
                chosen.append((request, end))
        return self._batch(chosen)

    def fork(self, parent: Request, child: Request) -> bool:
        """Begin a request on a copy of a running one; False where there is no room, and nothing has changed."""
        assert parent.sequence is not None, "a running request has a sequence"
        shared = len(self._books.pages_of(parent.sequence))
        if len(self._running) == self._policy.max_batch or not self._fits(child, shared):
            return False
        try:
            hit = self._books.fork(parent.sequence)
        except CacheMemoryError:
            return False
        self._storage.apply(hit.copies)
        child.sequence, child.cached, child.reused = hit.sequence, hit.length, hit.length
        insort(self._running, child, key=_BY_ARRIVAL)
        return True

    def snapshot(self, request: Request) -> None:
        """Keep a running request's present state for prompts that continue it, while there is room."""
        assert request.sequence is not None, "a running request has a sequence"
        self._storage.apply(self._books.snapshot(request.sequence))

    def preempt(self, request: Request) -> None:
        """Take a running request's part of the cache for others. It goes on from there once there is room again."""
        assert request.sequence is not None, "a running request has a sequence"
        pages, window = self._books.pages_of(request.sequence), self._books.window_of(request.sequence)
        request.saved = self._storage.save(pages, window)
        self.preemptions += 1
        self._leave(request)
        self.add(request)

    def restart(self, request: Request) -> None:
        """Take a running request's part of the cache, of which a failed step left nobody knows what. All its tokens
        will be computed again, one by one those that it had sampled, as it was the first time."""
        self._leave(request)
        request.cached = 0
        self.add(request)

    def remove(self, request: Request) -> None:
        """Forget a finished or cancelled request and free its part of the cache. Twice is once."""
        if request in self._waiting:
            self._waiting.remove(request)
        request.saved = None
        if request.sequence is not None:
            self._leave(request)

    def finished(self) -> list[Request]:
        """The running requests that need their part of the cache no longer."""
        return [r for r in self._running if r.finish_reason is not None]

    def _enter(self, request: Request) -> None:
        """Give a waiting request its sequence: with the bytes that were saved, or what the cache has of its prompt.

        Raises:
            CacheMemoryError: there is no room; nothing has changed.
        """
        if request.saved is None:
            reuse = self._policy.reuse and request.params.prompt_logprobs is None
            hit = self._books.open(request.prompt if reuse else ())
            self._storage.apply(hit.copies)
            request.sequence = hit.sequence
            request.cached = request.reused = hit.length
            return
        sequence = self._books.open().sequence
        try:
            plan = self._books.append(sequence, request.tokens(0, request.cached))
        except CacheMemoryError:
            self._books.free(sequence)
            raise
        self._storage.restore(request.saved, plan.block_table, plan.window_slot)
        request.sequence, request.saved = sequence, None

    def _leave(self, request: Request) -> None:
        assert request.sequence is not None, "a running request has a sequence"
        self._running.remove(request)
        self._books.free(request.sequence)
        request.sequence = None

    def _fits(self, request: Request, shared: int = 0) -> bool:
        """Whether there are pages for all that a request, with so many of its pages shared, and the running ones may
        still need."""
        growth = sum(self._growth(r, len(self._books.pages_of(r.sequence))) for r in self._running if r.sequence)
        return growth + self._growth(request, shared) <= self._books.available_pages

    def _growth(self, request: Request, held: int) -> int:
        reserve = self._policy.reserve
        length = request.max_length if reserve is None else min(request.max_length, request.length + reserve)
        return max(0, reserved_pages(self._layout, length) - held)

    def _batch(self, chosen: Sequence[tuple[Request, int]]) -> Batch:
        """Appends to each of the requests, which come by arrival, its tokens up to a position."""
        batch: list[tuple[Request, Work]] = []
        for request, end in chosen:
            tokens = request.tokens(request.cached, end)
            plan = self._append(request, tokens, ())
            if plan is not None:
                batch.append((request, Work(plan, tokens)))
                request.cached = end
        return batch

    def _append(self, request: Request, tokens: Sequence[int], pinned: Collection[Request]) -> AppendPlan | None:
        """Make room for a request's next tokens, at the cost of younger ones if need be; None where it has to wait
        itself, as it does once an older one has taken its pages.

        The oldest waits for nobody but those in the middle of a step, so that there is always one that goes on.
        Whoever has to leave has not been planned for in this step, since requests are planned for by arrival.
        """
        while request.sequence is not None:
            try:
                return self._books.append(request.sequence, tokens)
            except CacheMemoryError as error:
                victim = next(r for r in reversed(self._running) if r not in pinned)
                if victim is request and self._running == [request]:
                    request.fail(error)
                    return None
                self.preempt(victim)
        return None
