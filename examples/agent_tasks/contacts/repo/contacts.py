"""Contacts from a file of comma-separated values."""

import csv
import io
from pathlib import Path


def decode(content: bytes) -> str:
    """The text of a file."""
    return content.decode("utf-8")


def read_contacts(path: Path) -> list:
    """The contacts of a file, each a mapping from column to value; empty lines are left out."""
    text = decode(Path(path).read_bytes())
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [dict(row) for row in rows]


def names(contacts: list) -> list:
    """Their names, in the order of the file."""
    return [contact["name"] for contact in contacts]
