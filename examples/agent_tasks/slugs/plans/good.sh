cat > slugs.py <<'EOF'
"""The part of an address that a title becomes."""

import re
import unicodedata


def slug(title: str) -> str:
    """Lower-case ASCII letters and digits, words joined by a hyphen."""
    text = unicodedata.normalize("NFKD", title.casefold())
    text = "".join(character for character in text if not unicodedata.combining(character))
    return "-".join(re.findall(r"[a-z0-9]+", text)) or "untitled"


def unique(title: str, taken: set) -> str:
    """A slug that is not taken yet, with a number where it has to be."""
    base, number = slug(title), 1
    candidate = base
    while candidate in taken:
        number += 1
        candidate = f"{base}-{number}"
    return candidate
EOF
