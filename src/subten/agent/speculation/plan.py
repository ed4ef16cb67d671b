"""The form of a plan: a fenced block of shell code, read while it streams.

A proposer answers with prose and one fenced block that begins with ```` ```bash ````. The block is the plan:
commands, and here-documents where files are written. A fence of more backticks may hold one of fewer, as in Markdown.
What follows the block is not read.
"""

from __future__ import annotations

import re

LANGUAGES = ("bash", "sh", "shell")
MAX_CHARACTERS = 65_536
"""Of a plan; a longer one is not read, as the policy reads no longer statement either."""

_OPENING = re.compile(rf"^ {{0,3}}(`{{3,}})[ \t]*(?:{'|'.join(LANGUAGES)})[ \t]*\r?\n", re.MULTILINE)
_CLOSING = re.compile(r"^ {0,3}(`+)[ \t]*\r?(?:\n|\Z)", re.MULTILINE)
_MAYBE_CLOSING = re.compile(r" {0,3}`*[ \t]*\r?\Z")


class PlanReader:
    """Takes an answer piece by piece and gives the plan in it, likewise.

    A line that may still become the closing fence is held back until it is known what it is.
    """

    def __init__(self) -> None:
        self._script: list[str] = []
        self._pending = ""
        self._fence = ""
        self.done = False
        """Whether the block has ended."""

    @property
    def script(self) -> str:
        """The plan as far as it is known."""
        return "".join(self._script)

    @property
    def begun(self) -> bool:
        """Whether there is a block."""
        return bool(self._fence)

    def push(self, text: str) -> str:
        """Take the next piece of the answer; what it adds to the plan."""
        if self.done:
            return ""
        self._pending += text
        if not self._fence:
            opening = _OPENING.search(self._pending)
            if opening is None:
                # Only the last line may still become a fence.
                self._pending = self._pending[self._pending.rfind("\n") + 1 :]
                return ""
            self._fence = opening[1]
            self._pending = self._pending[opening.end() :]
        return self._take(final=False)

    def finish(self) -> str:
        """The answer has ended; what was held back. An answer that is cut off leaves a block that is not `done`."""
        return self._take(final=True) if self._fence and not self.done else ""

    def _take(self, *, final: bool) -> str:
        added = []
        while not self.done and (line := self._next_line(final=final)):
            closing = _CLOSING.match(line) if self._at_start else None
            if closing is not None and len(closing[1]) >= len(self._fence):
                self.done = True
            else:
                added.append(line)
                self._script.append(line)
        return "".join(added)

    @property
    def _at_start(self) -> bool:
        """Whether a line of the plan begins here."""
        return not self._script or self._script[-1].endswith("\n")

    def _next_line(self, *, final: bool) -> str:
        """A line, or a part of one that can't be a closing fence; nothing where more is needed."""
        end = self._pending.find("\n") + 1
        if end == 0:
            if not final and self._at_start and _MAYBE_CLOSING.match(self._pending):
                return ""
            end = len(self._pending)
        line, self._pending = self._pending[:end], self._pending[end:]
        return line


def fenced(script: str) -> str:
    """A plan as an answer holds it: in a fence longer than any in it."""
    longest = max((len(ticks) for ticks in re.findall("`+", script)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{LANGUAGES[0]}\n{script if script.endswith(chr(10)) or not script else script + chr(10)}{fence}\n"
