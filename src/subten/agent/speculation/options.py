"""How a run searches, as data."""

from __future__ import annotations

from dataclasses import dataclass

from subten.agent.sandbox import require_clones
from subten.errors import ParameterError


@dataclass(frozen=True)
class Options:
    """How a run searches.

    Attributes:
        branches: candidates of a round, 1 to `MOST_CLONES` of the sandboxes.
        rounds: at most so many.
        parallel: plans that run at a time; None is `branches`.
        plan_seconds: that a plan may run.
        proposal_seconds: that an answer may take.
        max_tokens: of an answer.
        token_seconds: what a token counts as in the cost of a branch, beside the seconds of its sandbox.
        first_wins: the first plan that passes ends the run; otherwise its round is brought to an end, and the
            cheapest that passes wins.
        stream_policy: judge plans while they come; otherwise only when they are whole.
        repair: later rounds continue the best branches of those before; otherwise they begin at the task again.
        seed: of the proposer.

    Raises:
        ParameterError: a number is outside its range.
    """

    branches: int = 4
    rounds: int = 1
    parallel: int | None = None
    plan_seconds: float = 60.0
    proposal_seconds: float = 300.0
    max_tokens: int = 2048
    token_seconds: float = 0.01
    first_wins: bool = True
    stream_policy: bool = True
    repair: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_clones("branches", self.branches)
        for name in ("rounds", "max_tokens", "parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name} is {value}; it must be 1 or more")
        for name in ("plan_seconds", "proposal_seconds"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        if not self.token_seconds >= 0:
            raise ParameterError(f"token_seconds is {self.token_seconds}; it must be 0 or more")
