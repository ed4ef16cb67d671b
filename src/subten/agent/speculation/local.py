"""Plans from a model in this process: a prompt is computed once, and every candidate is a copy-on-write fork."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from subten.agent.speculation.plan import LANGUAGES
from subten.agent.speculation.proposer import Message, Piece
from subten.engine import AsyncEngine, Delta, SamplingParams
from subten.engine.async_engine import Generation
from subten.engine.tokenizer import Tokenizer
from subten.errors import ProposerError

_OPENING = f"```{LANGUAGES[0]}\n"


class EngineProposer:
    """Asks an `AsyncEngine`.

    The answer begins with the opening fence, which is put into its mouth: a plan comes from its first token on.

    Args:
        engine: it stays the caller's, who closes it.
        params: how tokens are drawn; `n` and `seed` are set for each call.
        name: of the model, for the log.
    """

    def __init__(self, engine: AsyncEngine, params: SamplingParams, name: str) -> None:
        self._engine = engine
        self._params = params
        self.name = name

    async def propose(self, messages: Sequence[Message], count: int, seed: int) -> Sequence[EngineCandidate]:
        """See Proposer.

        Raises:
            ContextLengthError: the conversation is as long as the context or longer.
            EngineStoppedError: the engine is closed or has failed.
        """
        prompt = await self._engine.with_tokenizer(lambda tokenizer: _prompt(tokenizer, messages))
        generation = await self._engine.submit(prompt, replace(self._params, n=count, seed=seed))
        answers = _Answers(generation, count)
        return [EngineCandidate(answers, index) for index in range(count)]


class _Answers:
    """The answers of one generation, each with a queue of its own."""

    def __init__(self, generation: Generation, count: int) -> None:
        self.generation = generation
        self.queues: list[asyncio.Queue[Delta]] = [asyncio.Queue() for _ in range(count)]
        self._reader = asyncio.create_task(self._read())
        self._released: set[int] = set()

    async def _read(self) -> None:
        async for delta in self.generation:
            self.queues[delta.index].put_nowait(delta)

    async def release(self, index: int) -> None:
        """Cancel one; with the last one the reader ends."""
        if index in self._released:
            return
        self._released.add(index)
        self.generation.cancel(index)
        if len(self._released) == len(self.queues):
            await self._reader


class EngineCandidate:
    """One fork."""

    def __init__(self, answers: _Answers, index: int) -> None:
        self._answers = answers
        self._index = index

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """See Candidate."""
        yield Piece(_OPENING, tokens=0)
        while True:
            delta = await self._answers.queues[self._index].get()
            if delta.error is not None:
                raise ProposerError(f"the model gave no answer: {delta.error}") from delta.error
            yield Piece(delta.text, len(delta.token_ids))
            if delta.finish_reason is not None:
                return

    async def release(self) -> None:
        """See Candidate. Its pages are free after the step that is under way."""
        await self._answers.release(self._index)


def _prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The conversation and the beginning of an answer."""
    if tokenizer.has_chat_template:
        opening = tokenizer.encode(_OPENING, add_special_tokens=False)
        return [*tokenizer.chat([dict(message) for message in messages]), *opening]
    return tokenizer.encode("\n\n".join([*(message["content"] for message in messages), _OPENING]))
