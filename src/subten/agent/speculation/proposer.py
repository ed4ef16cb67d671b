"""What proposes plans, and how a plan arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = Mapping[str, str]
"""`role` and `content`, as in the chat format of the OpenAI API."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it comes.

    Attributes:
        text: may be empty, where a token gave no whole character yet.
        tokens: that it took; 0 for text that was not generated.
    """

    text: str
    tokens: int = 1


class Candidate(Protocol):
    """An answer under way; it is read once."""

    def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, to the end of the answer.

        Raises:
            ProposerError: at the piece where it failed.
        """

    async def release(self) -> None:
        """Stop generating and free what it holds: its part of a KV cache, a connection. Twice is once."""


class Proposer(Protocol):
    """Answers a conversation several times at once."""

    @property
    def name(self) -> str:
        """For the log."""

    async def propose(self, messages: Sequence[Message], count: int, seed: int) -> Sequence[Candidate]:
        """Begin `count` answers; candidates that are the same for the same seed, as far as the model is.

        Args:
            messages: the conversation, the last one a user's.
            count: how many, at least 1.
            seed: of the first; the others have seeds of their own that follow from it.

        Raises:
            SubtenError: none could be begun.
        """
