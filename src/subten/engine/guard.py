"""What may come next: a guard follows one answer token by token and says which tokens may continue it.

A grammar (structured output) and a policy (tool calls judged while they are written) are guards. The sets are bit
masks that sampling applies on the device, after every other rule, so that nothing a guard forbids is ever sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from subten.errors import GuardError

log = logging.getLogger(__name__)


class TokenGuard(Protocol):
    """The state of one answer. It belongs to the engine's thread."""

    def allowed(self) -> Tensor | None:
        """int32 [ceil(vocab / 32)] on the CPU: bit i % 32 of word i // 32 says whether token i may come next. None
        allows all. Where the answer has to end, the ending ones are allowed. An answer of which no token is allowed
        fails."""

    def accept(self, token_id: int) -> None:
        """The answer has gone on with a token, an allowed one."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow any more, which ends the answer."""

    def fork(self) -> TokenGuard:
        """A guard of a second answer that begins with the same tokens."""


@contextmanager
def guarding() -> Iterator[None]:
    """Inside, whatever a guard raises is that answer's error, and not the engine's.

    Raises:
        GuardError: the guard has raised something.
    """
    try:
        yield
    except Exception as error:
        log.error("a guard has failed", exc_info=error)
        raise GuardError(f"what holds the answer to its form has failed: {error!r}") from error


GuardMaker = Callable[[], TokenGuard]
"""Makes the guard of an answer that has no tokens yet."""


def allowed_tokens(masks: Tensor, vocab: int) -> Tensor:
    """bool [rows, vocab] from int32 [rows, words], on the device of the masks. Tokens behind the last word are not
    allowed."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    flat = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab]
    return torch.nn.functional.pad(flat, (0, vocab - flat.shape[1]))
