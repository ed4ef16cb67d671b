"""Where events go as they happen: into the state of the run, and to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from subten.agent.policy import Decision
from subten.agent.speculation import events
from subten.agent.speculation.check import Score
from subten.agent.speculation.tree import Tree, after


class Recorder:
    """The events of one run; it lives in its event loop.

    Args:
        listen: called with every event. After its first error it is called no more, and that is in `failure`: what is
            under way has to be released before a run can end.
    """

    def __init__(self, listen: Callable[[events.Event], None]) -> None:
        self._listen = listen
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.tree = Tree()
        self.failure: Exception | None = None

    def emit(self, kind: type[events.Event], **values: object) -> None:
        """Something happened now."""
        event = kind(t=round(self._loop.time() - self._began, 6), **values)
        self.tree = after(self.tree, event)
        if self.failure is None:
            try:
                self._listen(event)
            except Exception as error:
                self.failure = error

    def judged(self, branch: int, stage: str, decision: Decision) -> None:
        """The policy spoke."""
        self.emit(
            events.Judged,
            branch=branch,
            stage=stage,
            verdict=decision.verdict.word,
            rule=decision.rule,
            reason=decision.reason,
            span=decision.span,
        )

    def checked(self, branch: int, score: Score, *, confirms: bool) -> None:
        """A check was made."""
        self.emit(
            events.Checked,
            branch=branch,
            confirms=confirms,
            passed=score.passed,
            value=score.value,
            passed_tests=score.passed_tests,
            tests=score.tests,
            seconds=score.seconds,
            output=score.output,
        )
