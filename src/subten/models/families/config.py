"""Reading a Hugging Face `config.json` that may be incomplete or wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from subten.errors import CheckpointError

MOST = 1 << 20
"""Of any size, far above all models': the products that are numbers of elements then fit into 64 bits."""
MOST_PARTS = 1 << 14
"""Of layers, and of experts: the names of their tensors are listed before one is looked for."""
MOST_POSITIONS = 1 << 24
"""Of positions: the rotations of all of them are tabulated."""


class ConfigReader:
    """Typed access to a configuration; an entry that is null counts as absent.

    Without a default, an absent entry is a `CheckpointError`; so is an entry of the wrong type, with or without.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def raw(self, key: str) -> Any:
        """The entry as it stands, or None."""
        return self._config.get(key)

    def integer(self, key: str, default: int | None = None, *, most: int = MOST) -> int:
        """A positive integer of at most `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        if value > most:
            raise self._wrong(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; empty if absent."""
        value = self._get(key, [])
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "a list of integers")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        value = self._get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> ConfigReader:
        """A nested object; an empty one if absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value, f"{key} of {self._where}")

    def has(self, key: str) -> bool:
        """Whether there is an entry that is not null."""
        return self.raw(key) is not None

    def values(self) -> tuple[Any, ...]:
        """All entries."""
        return tuple(self._config.values())

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._where} has no {key!r}, which the model needs")
        return default

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{key!r} in {self._where} is {value!r} where {expected} is expected")
