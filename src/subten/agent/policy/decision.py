"""What a policy says about a command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """From lenient to strict."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"

    @property
    def severity(self) -> int:
        """The strictest of several verdicts has the largest."""
        return _SEVERITY[self]


_SEVERITY = {Verdict.ALLOW: 0, Verdict.ASK: 1, Verdict.DENY: 2}


@dataclass(frozen=True)
class Decision:
    """One verdict with its cause.

    Attributes:
        verdict: allow, ask or deny.
        rule: which line of the policy decided: a rule, `protect_paths: PATH`, `default` or `opaque`.
        span: characters [start, end) of the judged text that caused it.
        reason: one sentence for a person.
    """

    verdict: Verdict
    rule: str
    span: tuple[int, int]
    reason: str

    def as_json(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "decision": self.verdict.value,
            "rule": self.rule,
            "span": list(self.span),
            "reason": self.reason,
        }
