cat > durations.py <<'EOF'
"""Durations such as 1h30m as seconds."""

import re

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|h|m|s)\s*")


def seconds(text: str) -> float:
    """The seconds of a duration.

    Raises:
        ValueError: it is none.
    """
    total, position = 0.0, 0
    while position < len(text) or not text:
        part = _PART.match(text, position)
        if part is None:
            raise ValueError(f"{text!r} is no duration; it must be one such as 1h30m")
        total += float(part[1]) * UNITS[part[2]]
        position = part.end()
    return total
EOF
