"""Measurements that were committed: what `subten bench report` makes its tables and pictures of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subten.errors import StorageError

Row = Mapping[str, Any]
Machine = Mapping[str, Any]

_LATENCY, _PREFILL, _ITL = "latency*_h200.json", "prefill*_h200.json", "itl*_h200.json"
_MOE, _LINEAR = "moe*_h200.json", "linear*_h200.json"
_ATTENTION = "attention_h200.json"


@dataclass(frozen=True)
class Measured:
    """The rows of one kind of one or more runs.

    Attributes:
        rows: each once; of a case that was measured several times, the one of the last file that has a figure.
        runs: (file, machine) that they come from.
    """

    rows: Sequence[Row]
    runs: Sequence[tuple[str, Machine]]


@dataclass(frozen=True)
class Published:
    """All that is there; of a kind that is not, no rows.

    Attributes:
        steps: `LatencyRow`s.
        largest: `LargestRow`s.
        prefill: `PrefillRow`s.
        itl: `ItlRow`s.
        moe: `MoERow`s.
        linear: `LinearRow`s.
        attention: `AttentionRow`s.
    """

    steps: Measured
    largest: Measured
    prefill: Measured
    itl: Measured
    moe: Measured
    linear: Measured
    attention: Measured

    @classmethod
    def read(cls, folder: Path) -> Published:
        """The result files of a folder.

        Raises:
            StorageError: there is no such folder, or a file of these names is no result file.
        """
        if not folder.is_dir():
            raise StorageError(f"there is no folder {folder}; name the one with the result files")
        latency = [_with_sources(*_content(path)) for path in sorted(folder.glob(_LATENCY))]
        prefill = [_content(path) for path in sorted(folder.glob(_PREFILL))]
        itl = [_content(path) for path in sorted(folder.glob(_ITL))]
        moe = [_content(path) for path in sorted(folder.glob(_MOE))]
        linear = [_content(path) for path in sorted(folder.glob(_LINEAR))]
        attention = [_content(path) for path in sorted(folder.glob(_ATTENTION))]
        return cls(
            _merged(
                latency,
                "latency",
                ("shape", "context", "batch", "kv", "moe"),
                lambda row: row["p50_ms"] is not None,
                _with_profile,
            ),
            _merged(latency, "largest", ("shape", "context", "kv", "moe", "limit_ms"), lambda r: r["note"] is None),
            _merged(
                prefill,
                "prefill",
                ("shape", "kv", "context", "chunk_size"),
                lambda r: r["p50_ms"] is not None,
            ),
            _merged(
                itl,
                "itl",
                ("shape", "kv", "prompt", "chunk_size", "streams", "budget_ms"),
                lambda r: r["note"] is None,
            ),
            _merged(
                moe,
                "moe",
                ("shape", "tokens", "weights", "kernel", "activations", "sums"),
                lambda r: r["us"] is not None,
            ),
            _merged(
                linear,
                "linear",
                ("layer", "outputs", "inputs", "tokens", "weights", "kernel"),
                lambda r: r["us"] is not None,
            ),
            _merged(
                attention,
                "attention",
                ("batch", "kv_heads", "group", "head_dim", "context", "format", "kernel", "mean_key"),
                lambda r: r["us"] is not None,
            ),
        )


def _content(path: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["machine"]["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is no file of results: {error}") from error
    return path.name, content


def _with_profile(before: Row, row: Row) -> Row:
    """The newer row, but times that were taken without the profiler; and a profile, if either has one."""
    newest = before if row["profile"] and not before["profile"] else row
    profiled = row if row["profile"] else before
    return {**newest, **{key: profiled[key] for key in ("profile", "profile_source")}}


def _with_sources(name: str, content: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Of every profile, as its step may have been timed in another run."""
    commit = content["machine"]["commit"]
    return name, {**content, "latency": [{**row, "profile_source": commit} for row in content["latency"]]}


def _merged(
    files: Sequence[tuple[str, Mapping[str, Any]]],
    kind: str,
    key: Sequence[str],
    complete: Callable[[Row], bool],
    join: Callable[[Row, Row], Row] = lambda _before, row: row,
) -> Measured:
    rows: dict[tuple[Any, ...], Row] = {}
    runs = []
    for name, content in files:
        for row in content.get(kind, ()):
            case = tuple(row[part] for part in key)
            if case not in rows or not complete(rows[case]):
                rows[case] = row
            elif complete(row):
                rows[case] = join(rows[case], row)
        if content.get(kind):
            runs.append((name, content["machine"]))
    return Measured(list(rows.values()), runs)
