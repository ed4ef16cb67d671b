"""JSON objects from files that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from subten.errors import CheckpointError, StorageError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError where it is no JSON object, StorageError where it can't be read."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    return parse_json_object(text, f"{path}")


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`; CheckpointError beginning with `what` where it is none."""
    try:
        value = json.loads(text)
    # ValueError covers bad syntax, bad UTF-8 and integers of absurd length; RecursionError absurd nesting.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__} where an object is expected")
    return value
