"""What a policy says about a command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Verdict(IntEnum):
    """From lenient to strict: the strictest of several is the largest."""

    ALLOW = 0
    ASK = 1
    DENY = 2

    @property
    def word(self) -> str:
        """As policy files and results write it."""
        return self.name.lower()


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
            "decision": self.verdict.word,
            "rule": self.rule,
            "span": list(self.span),
            "reason": self.reason,
        }
