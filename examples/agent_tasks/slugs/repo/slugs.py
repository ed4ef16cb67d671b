"""The part of an address that a title becomes."""

import re


def slug(title: str) -> str:
    """Lower-case ASCII letters and digits, words joined by a hyphen."""
    text = title.lower()
    text = re.sub(r"[^a-z0-9 ]", "", text)
    return "-".join(text.split(" "))


def unique(title: str, taken: set) -> str:
    """A slug that is not taken yet, with a number where it has to be."""
    base, number = slug(title), 1
    candidate = base
    while candidate in taken:
        number += 1
        candidate = f"{base}-{number}"
    return candidate
