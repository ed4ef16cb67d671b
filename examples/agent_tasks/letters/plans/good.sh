cat > letters.py <<'EOF'
"""Letters from templates: {name} is replaced by a value, {{ and }} are braces."""

import re

_PLACE = re.compile(r"{{|}}|{([^{}]+)}")


def fill(template: str, values: dict) -> str:
    """The letter; KeyError where a value is missing."""
    return _PLACE.sub(lambda place: str(values[place[1]]) if place[1] else place[0][0], template)
EOF
