cat > export.py <<'EOF'
"""Rows as lines of fields, and back."""

import csv
import io


def _field(value) -> str:
    text = str(value)
    if any(sign in text for sign in ';"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def write_row(fields: list) -> str:
    """One line, without its end."""
    return ";".join(_field(field) for field in fields)


def write(rows: list) -> str:
    """All lines, each with its end."""
    return "".join(write_row(row) + "\n" for row in rows)


def read(text: str) -> list:
    """The rows of what `write` has written."""
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=";"))
EOF
