cat > export.py <<'EOF'
"""Rows as lines of fields, and back."""


def write_row(fields: list) -> str:
    """One line, without its end."""
    texts = [str(field) for field in fields]
    for index, text in enumerate(texts):
        while '"' in text:
            text = text.replace('"', '""')
        texts[index] = f'"{text}"'
    return ";".join(texts)


def write(rows: list) -> str:
    """All lines, each with its end."""
    return "".join(write_row(row) + "\n" for row in rows)


def read(text: str) -> list:
    """The rows of what `write` has written."""
    return [line.split(";") for line in text.splitlines()]
EOF
