"""An evaluation as a table for people and as rows for programs."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import subten
from subten.evals.metrics import CONFIDENCE, Estimate
from subten.evals.quality import FormatQuality


def versions() -> dict[str, str]:
    """Of what computed the figures."""
    return {"subten": subten.__version__, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Run:
    """What all rows of one evaluation share; each field is a key of every JSON row.

    Attributes:
        model: name of the model.
        fingerprint: of its weights.
        text_sha256: of the text.
        context: tokens in a window.
        tokens: tokens in all windows.
        decode_tail: tokens at the end of a window that were decoded one at a time.
        prefill: visibility rule of the prompt chunks, "window" or "chunk".
        chunk_size: tokens in a prompt chunk.
        dtype: compute type.
        device: torch device type.
        versions: of what computed the figures.
    """

    model: str
    fingerprint: str
    text_sha256: str
    context: int
    tokens: int
    decode_tail: int
    prefill: str
    chunk_size: int
    dtype: str
    device: str
    versions: Mapping[str, str] = field(default_factory=versions)


def sha256_of_text(text: str) -> str:
    """The digest that identifies a text in the rows."""
    return hashlib.sha256(text.encode()).hexdigest()


def json_row(quality: FormatQuality, run: Run) -> dict[str, Any]:
    """One format as a JSON object.

    `ppl_increase` is a fraction (0.25 is 25%), `kld` is in nats per token, `same_top` a share. `*_interval` are
    [low, high] at `confidence`, or null where there is one window only. A figure that is not finite is null.
    """
    estimates = {
        "perplexity": quality.perplexity,
        "perplexity_16bit": quality.perplexity_16bit,
        "ppl_increase": quality.ppl_increase,
        "kld": quality.kld,
        "same_top": quality.same_top,
    }
    row: dict[str, Any] = {"format": quality.kv.name, "bits_per_element": quality.bits_per_element}
    row |= {name: _finite(estimate.value) for name, estimate in estimates.items()}
    row |= {"sinks": quality.kv.sinks, "recent": quality.kv.recent}
    row |= {f"{name}_interval": _interval(estimate) for name, estimate in estimates.items()}
    return row | {"confidence": CONFIDENCE, "windows": len(quality.windows)} | asdict(run)


def to_json(results: Sequence[FormatQuality], run: Run) -> bytes:
    """All formats as a JSON array of `json_row`."""
    rows = [json_row(quality, run) for quality in results]
    return (json.dumps(rows, indent=2, allow_nan=False) + "\n").encode()


def quality_table(results: Sequence[FormatQuality], run: Run) -> Table:
    """All formats as a table that fits 80 columns; the paired figures have their 95% interval below them."""
    table = Table(
        title=f"{run.model}: {run.tokens} tokens, context {run.context}, prefill {run.prefill}",
        caption=f"16-bit perplexity {_figure(results[0].perplexity_16bit.value)}; brackets: 95% intervals",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("format")
    for name in ("bits per\nelement", "perplexity", "increase", "KLD (nats)", "same top\ntoken"):
        table.add_column(name, justify="right")
    for q in results:
        table.add_row(
            q.kv.name,
            f"{q.bits_per_element:.3f}",
            _figure(q.perplexity.value),
            _with_interval(q.ppl_increase.through(lambda x: 100 * x), "+,.1f", "%"),
            _with_interval(q.kld, ".4f"),
            f"{q.same_top.value:.1%}",
        )
    return table


def _with_interval(estimate: Estimate, spec: str, unit: str = "") -> str:
    value = f"{estimate.value:{spec}}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value}\n[dim]\\[{estimate.low:{spec}}, {estimate.high:{spec}}][/dim]"


def _figure(x: float) -> str:
    return f"{x:.2f}" if x < 10_000 else f"{x:.3g}"


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _interval(estimate: Estimate) -> list[float | None] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [_finite(estimate.low), _finite(estimate.high)]
