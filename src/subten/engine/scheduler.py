"""Which requests take part in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from subten.engine.memory import reserved_pages
from subten.engine.request import Request
from subten.engine.runner import Work
from subten.formats import PageLayout
from subten.kvcache import CacheBooks, CopyPlan


@dataclass(frozen=True)
class Batch:
    """A step: the copies that admitted requests need first, and each request with its work."""

    copies: CopyPlan
    requests: tuple[Request, ...]
    work: tuple[Work, ...]


class Scheduler:
    """First come, first served; a request is admitted once the pages for its longest answer are set aside.

    So a running request never waits for memory and is never preempted. Every step carries one token of each
    request that is decoding, and prompt chunks for as long as they fit into `chunk_size` tokens. Chunks end at
    multiples of `chunk_size` from the start of the sequence, whatever else runs beside them, so that a result
    does not depend on company.
    """

    def __init__(self, books: CacheBooks, layout: PageLayout, max_batch: int, chunk_size: int, reuse: bool) -> None:
        self._books = books
        self._layout = layout
        self._max_batch = max_batch
        self._chunk_size = chunk_size
        self._reuse = reuse
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def schedule(self) -> Batch:
        """Admit what fits, and plan one step. Called only while `busy`; the step then has work."""
        copies = self._admit()
        work: list[tuple[Request, Work]] = []
        budget = self._chunk_size
        for request in self._running:
            end = request.length
            if request.prefilling:
                next_boundary = (request.cached // self._chunk_size + 1) * self._chunk_size
                end = min(len(request.prompt), next_boundary)
                if end - request.cached > budget:
                    continue
                budget -= end - request.cached
            assert request.sequence is not None, "a running request has a sequence"
            tokens = request.tokens(request.cached, end)
            work.append((request, Work(self._books.append(request.sequence, tokens), tokens)))
            request.cached = end
        return Batch(copies, tuple(r for r, _ in work), tuple(w for _, w in work))

    def remove(self, request: Request) -> None:
        """Forget a finished or cancelled request and free its part of the cache. Twice is once."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request.sequence is not None:
            self._running.remove(request)
            self._books.free(request.sequence)
            request.sequence = None

    def _admit(self) -> CopyPlan:
        copies = CopyPlan()
        reserved = sum(reserved_pages(self._layout, r.max_length) for r in self._running)
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            reserved += reserved_pages(self._layout, request.max_length)
            if reserved > self._books.pages.count:
                break
            hit = self._books.open(request.prompt if self._reuse else ())
            copies += hit.copies
            request.sequence = hit.sequence
            request.cached = request.reused = hit.length
            self._running.append(self._waiting.popleft())
        return copies
