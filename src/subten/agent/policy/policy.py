"""A policy as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subten.agent.policy.decision import Verdict
from subten.agent.policy.paths import normalised
from subten.agent.policy.rules import Rule
from subten.errors import PolicyError


@dataclass(frozen=True)
class Policy:
    """What commands may do.

    Attributes:
        rules: in any order; of those that match a command the strictest decides.
        protect_paths: absolute paths. Deleting, overwriting, truncating or moving away what is at or below is denied.
        default: for a command that no rule matches.
        opaque: for what can't be known before it runs; ask or deny.

    Raises:
        PolicyError: a protected path is not absolute, or `opaque` allows.
    """

    rules: Sequence[Rule] = ()
    protect_paths: Sequence[str] = ()
    default: Verdict = Verdict.ALLOW
    opaque: Verdict = Verdict.ASK

    def __post_init__(self) -> None:
        for path in self.protect_paths:
            if not path.startswith("/"):
                raise PolicyError(f"protect_paths has '{path}'; a protected path must be absolute, such as /srv/data")
        if self.opaque is Verdict.ALLOW:
            raise PolicyError("opaque is 'allow'; what can't be known before it runs may be asked or denied only")
        object.__setattr__(self, "protect_paths", tuple(normalised(path) for path in self.protect_paths))
