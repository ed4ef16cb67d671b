"""Tool calls in text: the form in which models are asked for them, and the scanner that finds them while they come.

The form is the one that Hermes introduced and Qwen's templates use::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Lima"}}
    </tool_call>

A grammar holds the model to it, from the opening tag on, with the arguments held to the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')


def call_format(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The format of a call of one tool, as a part of a structural tag."""
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters, "max_whitespace_cnt": 1},
        "end": f"}}\n{CLOSE}",
    }


def answer_format(calls: Sequence[dict[str, Any]], *, required: bool, parallel: bool) -> dict[str, Any]:
    """The format of an answer that may, or must, call tools.

    Args:
        calls: `call_format` of each tool that may be called.
        required: the answer is calls and nothing else; otherwise it is text in which calls may stand.
        parallel: more than one call.
    """
    if required:
        kind = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    else:
        kind = {"type": "triggered_tags", "triggers": [OPEN]}
    return {**kind, "tags": list(calls), "stop_after_first": not parallel}


@dataclass(frozen=True)
class Content:
    """Text of the answer that is no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; it is the `index`-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of a call's arguments. The pieces of a call, joined, are the JSON that the model wrote."""

    index: int
    text: str


Part = Content | CallStart | Arguments


class ToolCallScanner:
    """Finds calls in streamed text. However the text is cut into pieces, the joined parts are the same."""

    def __init__(self) -> None:
        self.calls = 0
        self._rest = ""
        self._state = self._outside

    @property
    def amid(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return bool(self._state == self._in_arguments)

    def push(self, piece: str) -> list[Part]:
        """What is certain once `piece` has come."""
        self._rest += piece
        parts: list[Part] = []
        while (taken := self._state(parts)) is not None:
            self._state = taken
        return parts

    def finish(self) -> list[Part]:
        """What is left at the end. A call that was cut off before its arguments began is text."""
        rest, self._rest = self._rest, ""
        if self._state == self._outside:
            return self._content(rest)
        return [Content(OPEN + rest)] if self._state == self._in_header else []

    # Each state takes what it can from the text that waits, and returns the next state, or None to wait for more.

    def _outside(self, parts: list[Part]) -> Any:
        before, found, after = self._rest.partition(OPEN)
        if found:
            self._rest = after
            parts += self._content(before)
            return self._in_header
        held = next((n for n in range(min(len(before), len(OPEN) - 1), 0, -1) if before.endswith(OPEN[:n])), 0)
        if self.calls and not before[: len(before) - held].strip():
            return None  # White space between calls; text may follow it.
        shown, self._rest = before[: len(before) - held], before[len(before) - held :]
        parts += self._content(shown)
        return None

    def _in_header(self, parts: list[Part]) -> Any:
        header = _HEADER.match(self._rest)
        if header:
            self._rest = self._rest[header.end() :]
            parts.append(CallStart(self.calls, json.loads(header[1])))
            self.calls += 1
            self._json = _JsonObject()
            return self._in_arguments
        return None

    def _in_arguments(self, parts: list[Part]) -> Any:
        piece, self._rest = self._json.take(self._rest)
        if piece:
            parts.append(Arguments(self.calls - 1, piece))
        return self._behind if self._json.found else None

    def _behind(self, _: list[Part]) -> Any:
        found, after = self._rest.partition(CLOSE)[1:]
        if found:
            self._rest = after
            return self._outside
        return None

    def _content(self, text: str) -> list[Part]:
        return [Content(text)] if text and not (self.calls and not text.strip()) else []


class _JsonObject:
    """Takes a JSON object that comes in pieces. Control characters that stand in its strings as they are, which a
    grammar may let pass, are escaped."""

    def __init__(self) -> None:
        self.found = False
        """Whether the object has ended."""
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, text: str) -> tuple[str, str]:
        """What of the text belongs to the object, and what is behind it."""
        shown: list[str] = []
        for place, character in enumerate(text):
            raw = self._quoted and character < " "
            shown.append(json.dumps(character)[1:-1] if raw else character)
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.found = True
                    return "".join(shown), text[place + 1 :]
        return "".join(shown), ""
