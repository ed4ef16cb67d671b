cat > durations.py <<'EOF'
"""Durations such as 1h30m as seconds."""

import re

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|h|m|s)\s*")


def seconds(text: str) -> float:
    """The seconds of a duration."""
    total, position = 0.0, 0
    while position < len(text):
        part = _PART.match(text)
        if part is None:
            raise ValueError(f"{text!r} is no duration")
        total += float(part[1]) * UNITS[part[2]]
    return total
EOF
