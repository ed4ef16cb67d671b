"""What may come next: a guard follows one answer token by token and says which tokens may continue it.

A grammar (structured output) and a policy (tool calls judged while they are written) are guards. The sets are bit
masks that sampling applies on the device, after every other rule, so that nothing a guard forbids is ever sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class TokenGuard(Protocol):
    """The state of one answer. It belongs to the engine's thread."""

    def allowed(self) -> Tensor | None:
        """int32 [ceil(vocab / 32)] on the CPU: bit i % 32 of word i // 32 says whether token i may come next. None
        allows all. At least one token is allowed; where the answer has to end, the ending ones are."""

    def accept(self, token_id: int) -> None:
        """The answer has gone on with a token, an allowed one."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow any more, which ends the answer."""

    def fork(self) -> TokenGuard:
        """A guard of a second answer that begins with the same tokens."""


GuardMaker = Callable[[], TokenGuard]
"""Makes the guard of an answer that has no tokens yet."""


def allowed_tokens(masks: Tensor, vocab: int) -> Tensor:
    """bool [rows, vocab] from int32 [rows, words], on the device of the masks. Tokens behind the last word are not
    allowed."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    flat = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab]
    return torch.nn.functional.pad(flat, (0, vocab - flat.shape[1]))
