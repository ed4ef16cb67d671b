"""Escape sequences of `$'...'`, `echo -e` and `printf`."""

from __future__ import annotations

import re

_SIMPLE = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "?": "?",
}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|0?([0-7]{1,3})|c(.)|(.))", re.DOTALL
)
_MAX_CODE_POINT = 0x10FFFF


def unescape(text: str) -> str:
    """The text with its backslash sequences replaced; what bash leaves alone stays."""
    return _ESCAPE.sub(_replace, text) if "\\" in text else text


def _replace(match: re.Match[str]) -> str:
    hexadecimal, short, long, octal, control, other = match.groups()
    for digits, base in ((hexadecimal, 16), (short, 16), (long, 16), (octal, 8)):
        if digits is not None:
            code = int(digits, base)
            if base == 8:
                code &= 0xFF
            return chr(code) if code <= _MAX_CODE_POINT else "\ufffd"
    if control is not None:
        return chr(ord(control) & 0x1F)
    return _SIMPLE.get(other, match.group())
