"""Brace expansion, which comes before all others and knows nothing of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from subten.agent.policy.shell.tree import Part, Text
from subten.agent.policy.symbols import ANY, NUMBER

MAX_WORDS = 256
MAX_BRACES = 32

_SPLIT = re.compile(r"([{},])")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")

_Token: TypeAlias = Part | str
"""A part of the word, or one of the three active characters."""


def expand_braces(parts: Sequence[Part]) -> list[tuple[Part, ...]]:
    """The words that a word with braces stands for. Above `MAX_WORDS` they are one word of unknown text."""
    if not any(isinstance(part, Text) and not part.quoted and "{" in part.text for part in parts):
        return [tuple(parts)]
    tokens: list[_Token] = []
    for part in parts:
        if isinstance(part, Text) and not part.quoted:
            tokens += [piece if piece in "{}," else Text(piece, False) for piece in _SPLIT.split(part.text) if piece]
        else:
            tokens.append(part)
    words = _expand(tokens) if tokens.count("{") <= MAX_BRACES else []
    if not 0 < len(words) <= MAX_WORDS:
        return [(Text(ANY, True),)]
    return [tuple(Text(token, False) if isinstance(token, str) else token for token in word) for word in words]


def _expand(tokens: list[_Token]) -> list[list[_Token]]:
    for start, token in enumerate(tokens):
        if token != "{":
            continue
        choices, end = _choices(tokens, start)
        if choices is None:
            continue
        rests = _expand(tokens[end:])
        inner = [word for choice in choices for word in (_expand(choice) if len(choices) > 1 else [choice])]
        if len(inner) * len(rests) > MAX_WORDS:
            return [[]] * (MAX_WORDS + 1)
        return [[*tokens[:start], *middle, *rest] for middle in inner for rest in rests]
    return [tokens]


def _choices(tokens: list[_Token], start: int) -> tuple[list[list[_Token]] | None, int]:
    """What stands between the brace at `start` and its partner, and the place behind; None if it stays as it is."""
    depth = 0
    choices: list[list[_Token]] = [[]]
    for position in range(start, len(tokens)):
        token = tokens[position]
        if token == "{":
            depth += 1
            if depth == 1:
                continue
        elif token == "}":
            depth -= 1
            if depth == 0:
                if len(choices) > 1:
                    return choices, position + 1
                sequence = _sequence(choices[0])
                return sequence, position + 1
        elif token == "," and depth == 1:
            choices.append([])
            continue
        choices[-1].append(token)
    return None, start


def _sequence(tokens: list[_Token]) -> list[list[_Token]] | None:
    """`1..5` and `a..e`, as one choice each. The caller sees one choice as literal, so a single one is doubled."""
    if len(tokens) != 1 or not isinstance(tokens[0], Text):
        return None
    text = tokens[0].text
    match = _NUMBERS.fullmatch(text)
    if match:
        first, last = int(match[1]), int(match[2])
        step = abs(int(match[3] or 1)) or 1
        padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in (match[1], match[2]))
        if padded or abs(last - first) // step >= MAX_WORDS:
            return [[Text(NUMBER, True)]]
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return [[Text(str(number), True)] for number in numbers]
    match = _LETTERS.fullmatch(text)
    if match:
        first, last = ord(match[1]), ord(match[2])
        step = abs(int(match[3] or 1)) or 1
        letters = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return [[Text(chr(letter), True)] for letter in letters]
    return None
