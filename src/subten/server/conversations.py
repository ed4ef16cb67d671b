"""The tokens of conversations that may go on.

What a model wrote, spelled as text and cut into tokens again, need not be the tokens that it wrote, and then the
cache does not know it again. So the server remembers, of each answer of a chat, its text and its tokens. A later
prompt that begins with that text begins with those tokens: the next turn is taken up where the last one ended.
Control tokens are spelled out in that text, so that no prompt gets any that it does not spell itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from subten.engine import Tokenizer


@dataclass
class _Memory:
    token_ids: tuple[int, ...]
    used: float


class Conversations:
    """Belongs to the thread that tokenises.

    Args:
        most: conversations to remember; the least recently used one makes room.
        ttl: seconds after which one that has not gone on is forgotten; None keeps it.
        clock: tells seconds.
    """

    def __init__(self, most: int, ttl: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._ttl = ttl
        self._clock = clock
        self._memories: OrderedDict[str, _Memory] = OrderedDict()

    def encode(self, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
        """Token ids of a conversation's text, with those of the longest remembered one that it begins with."""
        self._expire()
        known = max((own for own in self._memories if _goes_on(own, text)), key=len, default=None)
        if known is None:
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        memory = self._memories[known]
        memory.used = self._clock()
        self._memories.move_to_end(known)
        return (*memory.token_ids, *tokenizer.encode(text[len(known) :], add_special_tokens=False))

    def remember(self, text: str, token_ids: Sequence[int]) -> None:
        """Keep a conversation: all of its text, the latest answer included, and the tokens that it is made of."""
        self._expire()
        self._memories[text] = _Memory(tuple(token_ids), self._clock())
        self._memories.move_to_end(text)
        while len(self._memories) > self._most:
            self._memories.popitem(last=False)

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl if self._ttl is not None else None
        while oldest is not None and self._memories and next(iter(self._memories.values())).used <= oldest:
            self._memories.popitem(last=False)


def _goes_on(known: str, text: str) -> bool:
    """Whether a text begins with a known one that ends where a turn may end. In the middle of a word none does: there
    an answer was cut off, and this text has one that went on, whose tokens are others."""
    return text.startswith(known) and not (known[-1:].isalnum() and text[len(known) :][:1].isalnum())
