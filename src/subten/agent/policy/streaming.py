"""Judging a command while it is being generated."""

from __future__ import annotations

from subten.agent.policy.decision import Decision
from subten.agent.policy.judge import Judgement, conclude, readable
from subten.agent.policy.policy import Policy
from subten.agent.policy.shell.parser import IncompleteError

_BOUNDARIES = " \t\n;&|<>()"


class StreamingPolicy:
    """Takes a command token by token and says at once when every continuation of it is denied.

    A denial by `push` is final: `judge` denies every text that begins with what was pushed. The other way round a
    command that was not stopped still has to be judged as a whole before it runs, which `finish` does.

    Args:
        policy: what is allowed.
        cwd: the absolute working directory the command will start in; None if that is not known.
    """

    def __init__(self, policy: Policy, cwd: str | None = None) -> None:
        self._judgement = Judgement(policy, cwd)
        self._text = ""
        self._awaited = ""
        self._next_look = 0

    @property
    def text(self) -> str:
        """What was pushed so far."""
        return self._text

    def push(self, token: str) -> Decision | None:
        """Take the next piece of text; the denial, as soon as there is one."""
        judgement = self._judgement
        if judgement.denied is not None:
            return judgement.denied
        self._text += token
        if not any(boundary in token for boundary in _BOUNDARIES) and self._awaited[-1:] not in token:
            return None
        if len(self._text) < self._next_look:
            return None
        missing = judgement.advance(readable(self._text), final=False)
        self._wait(missing)
        return judgement.denied

    def finish(self) -> Decision:
        """The decision on the whole text, which is what counts before it runs."""
        judgement = self._judgement
        text = readable(self._text)
        judgement.advance(text, final=True)
        return conclude(judgement, self._text, text)

    def _wait(self, missing: IncompleteError | None) -> None:
        """A long statement is not read again for every token: its length has to grow by a part of itself."""
        length = len(self._text) - self._judgement.position
        self._awaited = missing.awaited if missing is not None else ""
        self._next_look = len(self._text) + (length // 64 if missing is not None else 0)
