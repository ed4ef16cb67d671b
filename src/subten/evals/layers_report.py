"""The loss of each layer as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from subten.evals.figures import json_array, new_table, percent, with_interval
from subten.evals.quality import FormatQuality
from subten.evals.report import Run, json_row


def layer_shares(results: Sequence[FormatQuality]) -> list[float]:
    """Of `measure_layers`, each layer's KL divergence over the sum of all layers' (they are measured alone)."""
    alone = [quality.kld.value for quality in results[:-1]]
    return [kld / sum(alone) if kld else 0.0 for kld in alone]


def layers_rows(results: Sequence[FormatQuality], run: Run) -> list[dict[str, Any]]:
    """Results of `measure_layers` as JSON objects: `json_row`, and which layers were in the format.

    `kld_share` (`layer_shares`) is null in the row of all layers.
    """
    count = len(results) - 1
    places = [*([index] for index in range(count)), list(range(count))]
    shares = [*layer_shares(results), None]
    return [
        {"layers": layers, "kld_share": share} | json_row(quality, run)
        for layers, share, quality in zip(places, shares, results, strict=True)
    ]


def layers_json(results: Sequence[FormatQuality], run: Run) -> bytes:
    """Results of `measure_layers` as a JSON array of `layers_rows`."""
    return json_array(layers_rows(results, run))


def layers_table(results: Sequence[FormatQuality], run: Run) -> Table:
    """Results of `measure_layers` as a table that fits 80 columns."""
    *alone, together = results
    total = sum(quality.kld.value for quality in alone)
    table = new_table(
        f"{run.model}: {together.kv.name} in one layer; {run.tokens} tokens, context {run.context}",
        f"KLD of the single layers adds up to {total:.4f}\nbrackets: 95% intervals",
        *("layer", "KLD (nats)", "share", "perplexity\nincrease", "same top\ntoken"),
    )
    names = [*(str(index) for index in range(len(alone))), "all"]
    shares = [*(f"{share:.0%}" for share in layer_shares(results)), ""]
    for name, share, q in zip(names, shares, results, strict=True):
        table.add_row(
            name,
            with_interval(q.kld, ".4f"),
            share,
            with_interval(percent(q.ppl_increase), "+,.1f", "%"),
            f"{q.same_top.value:.1%}",
            end_section=q is alone[-1],
        )
    return table
