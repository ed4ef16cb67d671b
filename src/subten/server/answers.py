"""The answers to one request while they are generated: deltas of all prompts in one stream, measured."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from subten.engine import Delta, Generation, SamplingParams
from subten.engine.request import Request
from subten.server.api_errors import from_subten, shutting_down
from subten.server.limits import Place
from subten.server.metrics import Metrics
from subten.server.schema import PromptTokensDetails, Usage

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """What a step has added to one of the answers."""

    prompt: int
    """Which prompt it answers."""
    choice: int
    """Which of all answers of the request it is."""
    delta: Delta


class Answers:
    """Of one request, to one or several prompts. Leaving its ``async with`` block ends what is still under way.

    Args:
        metrics: where the figures go.
        place: left at the end.
        prompt_tokens: length of each prompt.
        params: of each prompt.
        texts: the prompts, where they are to be logged.
    """

    def __init__(
        self,
        metrics: Metrics,
        place: Place,
        prompt_tokens: Sequence[int],
        params: Sequence[SamplingParams],
        texts: Sequence[str] | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._texts = texts
        self._metrics = metrics
        self._place = place
        self._prompt_tokens = prompt_tokens
        self._offsets = [sum(own.n for own in params[:index]) for index in range(len(params))]
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._latest: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._generations: list[Generation] = []
        self.finish_reasons: dict[int, str] = {}
        """Of the answers that have ended."""

    def add(self, generation: Generation) -> None:
        """Take up the next prompt's answers."""
        self._generations.append(generation)

    def request(self, prompt: int, choice: int) -> Request:
        """The engine's own state of an answer; its prompt's log-probabilities are there once it has a token."""
        return self._generations[prompt].answers[choice - self._offsets[prompt]]

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes, as it comes.

        Raises:
            ApiError: an answer failed, or the server ended it.
        """
        async with aclosing(_merged(self._generations)) as deltas:
            async for prompt, delta in deltas:
                piece = Piece(prompt, self._offsets[prompt] + delta.index, delta)
                self._measure(piece)
                if delta.error is not None:
                    raise from_subten(delta.error) from delta.error
                if delta.finish_reason == "cancelled":
                    raise shutting_down("the server is shutting down and has ended the answer")
                yield piece

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, completion = sum(self._taken_prompts), sum(self._tokens.values())
        details = PromptTokensDetails(cached_tokens=sum(g.answers[0].reused for g in self._generations))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )

    def close(self) -> None:
        """End what is still under way, and count. Twice is once."""
        if self._place.left:
            return
        for generation in self._generations:
            generation.cancel()
        self._place.leave()
        if not self._generations:
            return
        metrics, usage = self._metrics, self.usage()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.prefix_queries.inc(usage.prompt_tokens)
        metrics.prefix_hits.inc(usage.prompt_tokens_details.cached_tokens)
        seconds = time.perf_counter() - self._begun
        metrics.request_seconds.observe(seconds)
        for tokens in self._taken_prompts:
            metrics.request_prompt_tokens.observe(tokens)
        for choice, reason in enumerate(self._reasons()):
            metrics.request_generation_tokens.observe(self._tokens.get(choice, 0))
            metrics.finished(reason)
        self._log(usage, seconds)

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def _taken_prompts(self) -> Sequence[int]:
        """Lengths of the prompts that the engine has taken; it may have refused one of several."""
        return self._prompt_tokens[: len(self._generations)]

    def _reasons(self) -> list[str]:
        """Why each answer ended. The last words of those that are ended from outside are not waited for."""
        answers = sum(len(generation.answers) for generation in self._generations)
        reasons = [self.finish_reasons.get(choice, "abort") for choice in range(answers)]
        return ["abort" if reason == "cancelled" else reason for reason in reasons]

    def _log(self, usage: Usage, seconds: float) -> None:
        figures = {
            "id": self.id,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "first_token_seconds": None if self._first is None else round(self._first, 6),
            "seconds": round(seconds, 6),
            "finish_reasons": self._reasons(),
        }
        if self._texts is not None:
            answers = [request.text for generation in self._generations for request in generation.answers]
            figures |= {"prompts": list(self._texts), "texts": answers}
        log.info("answered", extra=figures)

    def _measure(self, piece: Piece) -> None:
        now, new = time.perf_counter(), len(piece.delta.token_ids)
        if new:
            if piece.choice in self._latest:
                self._metrics.inter_token.observe(now - self._latest[piece.choice])
            else:
                self._metrics.first_token.observe(now - self._begun)
                self._first = now - self._begun if self._first is None else self._first
            self._latest[piece.choice] = now
            self._tokens[piece.choice] = self._tokens.get(piece.choice, 0) + new
            self._metrics.generation_tokens.inc(new)
        if piece.delta.finish_reason is not None:
            self.finish_reasons[piece.choice] = piece.delta.finish_reason


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all of them, each with the place of its generation."""
    if len(generations) == 1:
        async for only in generations[0]:
            yield 0, only
        return
    ready: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

    async def read(index: int, generation: Generation) -> None:
        async for delta in generation:
            ready.put_nowait((index, delta))
        ready.put_nowait((index, None))

    readers = [asyncio.create_task(read(index, generation)) for index, generation in enumerate(generations)]
    try:
        left = len(readers)
        while left:
            index, delta = await ready.get()
            if delta is None:
                left -= 1
            else:
                yield index, delta
    finally:
        for reader in readers:
            reader.cancel()
