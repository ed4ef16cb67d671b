"""Rules: which commands they match, and with how much certainty."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from subten.agent.policy.decision import Verdict
from subten.agent.policy.programs.effects import basename
from subten.agent.policy.symbols import ANY, FIELDS, is_known, visible

STANDARD_FOLDERS = frozenset(("/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin", "/usr/local/sbin"))


class Match(IntEnum):
    """How a rule stands to a command."""

    NO = 0
    MAYBE = 1
    """It depends on what is not known."""
    YES = 2


class Pattern(Protocol):
    """What a rule says about arguments."""

    def match(self, arguments: Sequence[str], *, complete: bool) -> Match:
        """Compare. Without `complete`, YES only if every longer command matches as well."""


class Condition(Protocol):
    """A further test on a command that matches."""

    def holds(self, arguments: Sequence[str], cwd: str) -> bool:
        """Whether it holds; arguments are known."""


@dataclass(frozen=True)
class PrefixPattern:
    """A list of tokens that the command begins with, each with its alternatives (as in Codex rule files)."""

    tokens: tuple[tuple[str, ...], ...]

    def match(self, arguments: Sequence[str], *, complete: bool) -> Match:  # noqa: ARG002
        """Token by token."""
        found = Match.YES
        for index, alternatives in enumerate(self.tokens):
            if index >= len(arguments):
                return Match.NO
            argument = arguments[index]
            if FIELDS in argument:
                return Match.MAYBE
            if not is_known(argument):
                found = Match.MAYBE
            elif argument not in alternatives:
                return Match.NO
        return found


class WildcardPattern:
    """Text in which `*` stands for anything (as in Claude Code's `Bash(...)`).

    ` *` and `:*` at the end also match the command without arguments.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r":\*$", " *", text)
        self.text = text
        self._open = text.endswith("*")
        head, optional = (text[:-2], "(?: .*)?") if text.endswith(" *") else (text, "")
        self._regex = re.compile(".*".join(map(re.escape, head.split("*"))) + optional, re.DOTALL)
        self._first = text.split(" ", 1)[0]

    def match(self, arguments: Sequence[str], *, complete: bool) -> Match:
        """On the arguments joined with blanks, with quotes where an argument needs them or without."""
        if not complete and not self._open:
            return Match.NO
        # What is not known is a symbol here, which only a `*` of the pattern matches, whatever it stands for.
        if self._regex.fullmatch(" ".join(arguments)) or self._regex.fullmatch(shlex.join(arguments)):
            return Match.YES
        if all(map(is_known, arguments)):
            return Match.NO
        first = arguments[0]
        if "*" in self._first or not is_known(first) or first == self._first:
            return Match.MAYBE
        return Match.NO

    def matches_exactly(self, arguments: Sequence[str]) -> bool:
        """For a rule that allows: an argument with a blank in it is not two arguments."""
        return self._regex.fullmatch(shlex.join(arguments)) is not None or (
            not any(re.search(r"\s", argument) for argument in arguments)
            and self._regex.fullmatch(" ".join(arguments)) is not None
        )


@dataclass(frozen=True)
class Rule:
    """One rule of a policy.

    Attributes:
        verdict: what it decides.
        name: how the policy file writes it.
        pattern: the commands that it is about.
        reason: why, in the words of whoever wrote the policy; may be empty.
        condition: a further test; None if there is none.
    """

    verdict: Verdict
    name: str
    pattern: Pattern
    reason: str = ""
    condition: Condition | None = None

    def match(self, arguments: Sequence[str], cwds: Sequence[str], *, complete: bool = True) -> Match:
        """How the rule stands to a command. A rule that allows never says MAYBE."""
        allows = self.verdict is Verdict.ALLOW
        best = Match.NO
        for spelling in _spellings(arguments, strict=allows):
            found = self._pattern_match(spelling, complete=complete)
            if allows and isinstance(self.pattern, WildcardPattern) and found is Match.YES:
                found = Match.YES if self.pattern.matches_exactly(spelling) else Match.NO
            best = max(best, found)
        if best is Match.NO or (allows and best is Match.MAYBE):
            return Match.NO
        if self.condition is not None:
            if not complete:
                return Match.NO
            if not all(map(is_known, (*arguments, *cwds))):
                return Match.NO if allows else Match.MAYBE
            held = [self.condition.holds(arguments, cwd) for cwd in cwds]
            return best if (all(held) if allows else any(held)) else Match.NO
        return best

    def _pattern_match(self, arguments: Sequence[str], *, complete: bool) -> Match:
        return self.pattern.match(arguments, complete=complete)


def _spellings(arguments: Sequence[str], *, strict: bool) -> list[Sequence[str]]:
    """The command as written and without the folder of its program; `strict`: only if that is a usual one."""
    name = arguments[0]
    folder, slash, short = name.rpartition("/")
    if not slash or name == ">" or (strict and folder not in STANDARD_FOLDERS):
        return [arguments]
    return [arguments, [basename(short), *arguments[1:]]]


def shown(arguments: Sequence[str]) -> str:
    """A command for a message, not too long."""
    text = visible(" ".join(arguments).replace(ANY, "..."))
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
