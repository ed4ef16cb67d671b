"""Strings that are not wholly known: a few private-use characters stand for what only the shell will know.

A text to be judged never contains these characters (`judge.py` refuses it), so they can't be forged.
"""

from __future__ import annotations

import re

STAR = "\ue000"
"""An active `*`."""
QUESTION = "\ue001"
"""An active `?`."""
BRACKET = "\ue002"
"""An active `[`; the pattern ends at the next `]`."""
ANY = "\ue003"
"""Any text at all, in one field."""
FIELDS = "\ue004"
"""Any text in any number of fields: options, operands, nothing."""
NUMBER = "\ue005"
"""An integer."""
BELOW = "\ue006"
"""Nothing, or a slash and any path: what a walk through a folder finds."""
SOME_BELOW = "\ue007"
"""The same after a filter that may leave nothing."""
NAME = "\ue008"
"""A fresh file name without a slash, such as that of a temporary file."""

SYMBOLS = STAR + QUESTION + BRACKET + ANY + FIELDS + NUMBER + BELOW + SOME_BELOW + NAME
RESERVED = re.compile("[\ue000-\ue01f]")
_MAX_STARS = 4
_UNKNOWN = re.compile(f"[{ANY}{FIELDS}]")
_BRACKET = re.compile(f"([!^]?\\]?(?:[{BRACKET}[][:=.][^\\]]*[:=.]\\]|[^]/])*)\\]")
_VISIBLE = {
    STAR: "*",
    QUESTION: "?",
    BRACKET: "[",
    ANY: "(unknown)",
    FIELDS: "(unknown)",
    NUMBER: "(number)",
    BELOW: "/...",
    SOME_BELOW: "/...",
    NAME: "(name)",
}
_TO_VISIBLE = str.maketrans(_VISIBLE)
_TO_ACTIVE = str.maketrans({"*": STAR, "?": QUESTION, "[": BRACKET})
_TO_LITERAL = str.maketrans({STAR: "*", QUESTION: "?", BRACKET: "["})


def is_known(text: str) -> bool:
    """Whether every character of it is known."""
    return text.isascii() or RESERVED.search(text) is None


def is_unknown(text: str) -> bool:
    """Whether it may contain anything."""
    return not text.isascii() and _UNKNOWN.search(text) is not None


def visible(text: str) -> str:
    """For a message."""
    return text if text.isascii() else text.translate(_TO_VISIBLE)


def activate(text: str) -> str:
    """Pattern characters become active, as in an unquoted expansion."""
    return text.translate(_TO_ACTIVE)


def deactivate(text: str) -> str:
    """Pattern characters become literal, as in quotes or an assignment."""
    return text if text.isascii() else text.translate(_TO_LITERAL)


def settled(text: str) -> str:
    """A field after word splitting: a bracket that nothing closes stands for itself."""
    if BRACKET not in text:
        return text
    return re.sub(f"{BRACKET}(?!{_BRACKET.pattern})", "[", text)


def to_regex(text: str, *, slashes: bool) -> str:
    """A regular expression for the texts that it may stand for.

    Args:
        text: with symbols.
        slashes: whether patterns match slashes (in `case` and `[[`) or not (in file names).
    """
    anything = ".*" if slashes else "[^/]*"
    if text.count(STAR) > _MAX_STARS:
        # Many of them can make a search take forever; this matches at least as much.
        return anything if slashes or "/" not in text else ".*"
    parts: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == STAR:
            parts.append(anything)
        elif character == QUESTION:
            parts.append("." if slashes else "[^/]")
        elif character == BRACKET:
            bracket = _BRACKET.match(text, position)
            if not bracket:
                parts.append(r"\[")
                continue
            parts.append(_bracket(bracket.group(1)))
            position = bracket.end()
        elif character in (ANY, FIELDS, BELOW, SOME_BELOW):
            parts.append(".*")
        elif character == NUMBER:
            parts.append("-?[0-9]+")
        elif character == NAME:
            parts.append("[^/]+")
        else:
            parts.append(re.escape(character))
    return "".join(parts)


def _bracket(inside: str) -> str:
    """One bracket expression; classes and ranges that depend on the locale match anything."""
    negated = inside[:1] in ("!", "^")
    body = inside[1:] if negated else inside
    if "[" in body or BRACKET in body or any(character in body for character in SYMBOLS) or negated:
        return "[^/]"
    escaped = re.sub(r"([\\\]^&~|])", r"\\\1", body)
    pattern = f"[{escaped}]"
    try:
        re.compile(pattern)
    except re.error:
        return "[^/]"
    return pattern
