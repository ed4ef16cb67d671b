"""Durations such as 1h30m as seconds."""

import re

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(h|m|s|ms)")


def seconds(text: str) -> float:
    """The seconds of a duration.

    Raises:
        ValueError: it is none.
    """
    total = 0.0
    for number, unit in _PART.findall(text):
        total = float(number) * UNITS[unit]
    return total
