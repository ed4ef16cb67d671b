"""Quality on a text as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from subten.evals.figures import Computation, json_array, json_figures, new_table, percent, with_interval
from subten.evals.metrics import CONFIDENCE
from subten.evals.quality import FormatQuality


@dataclass(frozen=True, kw_only=True)
class Run(Computation):
    """What all rows of one evaluation share; each field is a key of every JSON row.

    Attributes:
        text_sha256: of the text.
        context: tokens in a window.
        tokens: tokens in all windows.
        decode_tail: tokens at the end of a window that were decoded one at a time.
        prefill: visibility rule of the prompt chunks, "window" or "chunk".
        chunk_size: tokens in a prompt chunk.
    """

    text_sha256: str
    context: int
    tokens: int
    decode_tail: int
    prefill: str
    chunk_size: int


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
    row |= {"sinks": quality.kv.sinks, "recent": quality.kv.recent} | json_figures(estimates)
    return row | {"confidence": CONFIDENCE, "windows": len(quality.windows)} | asdict(run)


def to_json(results: Sequence[FormatQuality], run: Run) -> bytes:
    """All formats as a JSON array of `json_row`."""
    return json_array([json_row(quality, run) for quality in results])


def quality_table(results: Sequence[FormatQuality], run: Run) -> Table:
    """All formats as a table that fits 80 columns; the paired figures have their 95% interval below them."""
    table = new_table(
        f"{run.model}: {run.tokens} tokens, context {run.context}, prefill {run.prefill}",
        f"16-bit perplexity {_figure(results[0].perplexity_16bit.value)}; brackets: 95% intervals",
        *("format", "bits per\nelement", "perplexity", "increase", "KLD (nats)", "same top\ntoken"),
    )
    for q in results:
        table.add_row(
            q.kv.name,
            f"{q.bits_per_element:.3f}",
            _figure(q.perplexity.value),
            with_interval(percent(q.ppl_increase), "+,.1f", "%"),
            with_interval(q.kld, ".4f"),
            f"{q.same_top.value:.1%}",
        )
    return table


def _figure(x: float) -> str:
    return f"{x:.2f}" if x < 10_000 else f"{x:.3g}"
