"""Judging a whole command, and the same step by step."""

from __future__ import annotations

import re
import unicodedata

from subten.agent.policy.decision import Decision, Verdict
from subten.agent.policy.evaluator import Evaluator, TooLongError
from subten.agent.policy.policy import Policy
from subten.agent.policy.second_parser import command_starts, require
from subten.agent.policy.shell.parser import IncompleteError, Parser, ShellSyntaxError
from subten.agent.policy.symbols import RESERVED

MAX_STATEMENT = 65_536
"""Characters of one statement; a longer one is not read."""

_UNFINISHED = "the text ends inside a quote or a construct"
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f]")


class Judgement:
    """The state of judging one text from its beginning."""

    def __init__(self, policy: Policy, cwd: str | None) -> None:
        require()
        self.policy = policy
        self.evaluator = Evaluator(policy, cwd)
        self.position = 0
        """Where the first statement begins that is not judged yet."""
        self.starts: set[int] = set()
        self.regions: list[tuple[int, int]] = []

    @property
    def denied(self) -> Decision | None:
        """The denial, if there is one already."""
        decision = self.evaluator.decision
        return decision if decision is not None and decision.verdict is Verdict.DENY else None

    def advance(self, text: str, *, final: bool) -> IncompleteError | None:
        """Judge what of the text is complete.

        Args:
            text: the text from its beginning; what was judged before must not have changed.
            final: nothing follows.

        Returns:
            what is missing for the statement at `position` to be complete; None if there is none.
        """
        while True:
            begin = self.position
            window = begin + MAX_STATEMENT
            parser = Parser(text[:window], begin, final=final and window >= len(text))
            try:
                while self.denied is None and (items := parser.next_statements()):
                    self.evaluator.run_items(items)
                    self.position = parser.position
                    self.starts.update(parser.starts)
                    self.regions += parser.regions
                if self.denied is not None or window >= len(text):
                    return None
                self.position = parser.position
                continue
            except IncompleteError as error:
                if window < len(text) and self.position > begin:
                    continue
                self._judge_open(parser)
                if final:
                    missing = "a statement is too long to be read" if window < len(text) else _UNFINISHED
                    self._mark(self.position, len(text), missing)
                return error
            except ShellSyntaxError as error:
                self._judge_open(parser)
                if final:
                    self._mark(min(error.position, len(text)), len(text), f"this is not read as shell: {error}")
                return IncompleteError("\0")
            except (TooLongError, RecursionError):
                break
        if final:
            self._mark(self.position, len(text), "the script has more steps than are followed")
        return IncompleteError("\0")

    def unseen(self, starts: set[int]) -> list[int]:
        """Those of the places where a command begins that the first parser did not take for one."""
        return sorted(
            start for start in starts - self.starts if not any(begin <= start < end for begin, end in self.regions)
        )

    def _judge_open(self, parser: Parser) -> None:
        """The commands of a statement that has not ended, as far as their words are closed."""
        for command in parser.open_commands():
            if self.denied is not None:
                return
            try:
                self.evaluator.run_open(command)
            except (TooLongError, RecursionError):
                return

    def _mark(self, start: int, end: int, reason: str) -> None:
        self.evaluator.judge.span = (start, end)
        self.evaluator.mark_opaque(reason)


def judge(policy: Policy, command: str, cwd: str | None = None) -> Decision:
    """The decision on a whole command.

    Args:
        policy: what is allowed.
        command: shell text; lone surrogates stand for bytes that are not UTF-8.
        cwd: the absolute working directory it starts in; None if that is not known, so that relative paths may be
            any.

    Raises:
        ExtraMissingError: tree-sitter, of the extra `agent`, is not installed.
    """
    judgement = Judgement(policy, cwd)
    text = readable(command)
    judgement.advance(text, final=True)
    return conclude(judgement, command, text)


def readable(command: str) -> str:
    """The text as a shell would see it: NUL bytes are dropped, and bytes that are not UTF-8 replaced."""
    if command.isascii() and "\0" not in command:
        return command
    return RESERVED.sub("\ufffd", _SURROGATE.sub("\ufffd", command)).replace("\0", "")


def conclude(judgement: Judgement, command: str, text: str) -> Decision:
    """What is said about the text as a whole, and the decision."""
    if judgement.denied is not None:
        return judgement.denied
    evaluator = judgement.evaluator
    evaluator.judge.span = (0, len(command))
    if text != command:
        evaluator.mark_opaque("it holds NUL bytes, private characters or bytes that are not UTF-8")
    for match in _CONTROL.finditer(text):
        evaluator.judge.span = match.span()
        evaluator.mark_opaque(f"it holds the control character {match.group()!r}")
        break
    if not text.isascii():
        _check_invisible(judgement, text)
    decision = evaluator.decision
    if decision is None or decision.verdict is Verdict.ALLOW:
        seen = command_starts(text)
        unseen = None if seen is None else judgement.unseen(seen)
        evaluator.judge.span = (0, len(text))
        if unseen is None:
            evaluator.mark_opaque("the second parser can't read it")
        elif unseen:
            evaluator.judge.span = (unseen[0], len(text))
            evaluator.mark_opaque("the second parser sees a command where the first sees none")
    decision = evaluator.decision
    return decision or Decision(judgement.policy.default, "default", (0, len(text)), "it runs no command")


def _check_invisible(judgement: Judgement, text: str) -> None:
    for index, character in enumerate(text):
        if character.isascii():
            continue
        category = unicodedata.category(character)
        if category in ("Zs", "Zl", "Zp", "Cf", "Cc") and not _quoted(text, index):
            judgement.evaluator.judge.span = (index, index + 1)
            name = unicodedata.name(character, "a control character")
            judgement.evaluator.mark_opaque(
                f"it holds {name} outside of quotes, which looks like a blank or like nothing"
            )
            return


def _quoted(text: str, index: int) -> bool:
    """Whether the line up to there has an open quote. Only used to ask less often about texts in quotes."""
    line = text[text.rfind("\n", 0, index) + 1 : index]
    return line.count("'") % 2 == 1 or line.count('"') % 2 == 1
