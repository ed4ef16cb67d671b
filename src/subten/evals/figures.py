"""Measured figures as people and programs read them, and what computed them."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import subten
from subten.engine import LoadedModel
from subten.evals.metrics import Estimate


def versions() -> dict[str, str]:
    """Of what computed the figures."""
    return {"subten": subten.__version__, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What computed the figures; each field is a key of every JSON row.

    Attributes:
        model: name of the model.
        fingerprint: of its weights.
        dtype: compute type.
        device: torch device type.
        versions: of the programs.
    """

    model: str
    fingerprint: str
    dtype: str
    device: str
    versions: Mapping[str, str] = field(init=False, default_factory=versions)


def computed_by(model: LoadedModel) -> dict[str, str]:
    """The fields of `Computation` that come from the model."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }


def sha256_of_text(text: str) -> str:
    """The digest that identifies a text in the rows."""
    return hashlib.sha256(text.encode()).hexdigest()


def json_array(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of a JSON file of rows."""
    return (json.dumps(rows, indent=2, allow_nan=False) + "\n").encode()


def json_figures(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Estimates as keys of a JSON row: NAME, and NAME_interval as [low, high] or null. What is not finite is null."""
    values = {name: _finite(estimate.value) for name, estimate in estimates.items()}
    return values | {f"{name}_interval": _interval(estimate) for name, estimate in estimates.items()}


def new_table(title: str, caption: str, *columns: str) -> Table:
    """An empty table of figures: a first column of names, then numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def percent(estimate: Estimate) -> Estimate:
    """A share in percent."""
    return estimate.through(lambda x: 100 * x)


def with_interval(estimate: Estimate, spec: str, unit: str = "") -> str:
    """A table cell: the value, and below it the interval where there is one."""
    value = f"{estimate.value:{spec}}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value}\n[dim]\\[{estimate.low:{spec}}, {estimate.high:{spec}}][/dim]"


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _interval(estimate: Estimate) -> list[float | None] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [_finite(estimate.low), _finite(estimate.high)]
