"""A proposer that has its answers from a list: for tests, examples, and candidate fixes that people wrote."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence

from subten.agent.speculation.proposer import Message, Piece
from subten.errors import ParameterError

_TOKEN = re.compile(r" ?\w{1,4}|\s|[^\w\s]")


class ScriptedProposer:
    """Gives out answers in turn, or drawn with known weights.

    Args:
        answers: texts.
        weights: how probable each answer is; None gives them out in turn.
        seed: of the draws. The n-th candidate depends on it and on n alone, not on how many were asked for at a time.
        seconds_per_token: how long each token takes; every candidate has a rate of its own, as in a batch that is
            bound by memory.
    """

    def __init__(
        self,
        answers: Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        seconds_per_token: float = 0.0,
    ) -> None:
        if not answers:
            raise ParameterError("a scripted proposer has no answers; give it at least one")
        if weights is not None and (len(weights) != len(answers) or min(weights) < 0 or not sum(weights)):
            raise ParameterError(
                f"there are {len(answers)} answers and the weights {list(weights)}; "
                "give one for each, none below 0 and not all 0"
            )
        self._answers = tuple(answers)
        self._weights = weights
        self._random = random.Random(seed)
        self._seconds_per_token = seconds_per_token
        self._given = 0

    @property
    def name(self) -> str:
        """See Proposer."""
        return f"{len(self._answers)} scripted answers"

    async def propose(self, messages: Sequence[Message], count: int, seed: int) -> Sequence[ScriptedCandidate]:  # noqa: ARG002
        """See Proposer; neither the conversation nor the seed of the call counts."""
        return [ScriptedCandidate(self._next(), self._seconds_per_token) for _ in range(count)]

    def _next(self) -> str:
        if self._weights is not None:
            return self._random.choices(self._answers, self._weights)[0]
        self._given += 1
        return self._answers[(self._given - 1) % len(self._answers)]


class ScriptedCandidate:
    """One of the answers, in pieces of about the size of a token."""

    def __init__(self, text: str, seconds_per_token: float) -> None:
        self._text = text
        self._seconds = seconds_per_token
        self._released = False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """See Candidate."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, token in enumerate(tokens(self._text), start=1):
            # By the clock, not by sums of sleeps: each of those is a little too long.
            await asyncio.sleep(max(0.0, began + number * self._seconds - loop.time()))
            if self._released:
                return
            yield Piece(token)

    async def release(self) -> None:
        """See Candidate."""
        self._released = True


def tokens(text: str) -> list[str]:
    """A text cut as a tokenizer might do it: up to four letters with the blank before them, or one sign."""
    return _TOKEN.findall(text)
