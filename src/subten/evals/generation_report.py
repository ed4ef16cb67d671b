"""Long generations as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from subten.evals.figures import Computation, json_array, json_figures, new_table, percent, with_interval
from subten.evals.generation import DISTINCT, NEAR_TIE, FormatTexts, looping_tokens
from subten.evals.metrics import CONFIDENCE


@dataclass(frozen=True, kw_only=True)
class GenerationRun(Computation):
    """What all rows of one evaluation share; each field is a key of every JSON row.

    Attributes:
        text_sha256: of the text that the prompts were cut from.
        prompts: number of prompts.
        prompt_tokens: their length.
        tokens: length of each continuation.
        prefill: visibility rule of the prompt chunks, "window" or "chunk".
        chunk_size: tokens in a prompt chunk.
    """

    text_sha256: str
    prompts: int
    prompt_tokens: int
    tokens: int
    prefill: str
    chunk_size: int


def generation_row(result: FormatTexts, run: GenerationRun) -> dict[str, Any]:
    """One format as a JSON object. `first_difference`, `gap` and `looping_tokens` have one entry per prompt."""
    estimates = {"same_tokens": result.same_tokens, "loop_rate": result.loop_rate}
    estimates |= {f"distinct_{n}": result.distinct(n) for n in DISTINCT}
    row: dict[str, Any] = {"format": result.kv.name, "sinks": result.kv.sinks, "recent": result.kv.recent}
    row |= {"identical": result.identical, "near_ties": result.near_ties, "median_gap": result.median_gap}
    row |= json_figures(estimates) | {"confidence": CONFIDENCE}
    row |= {
        "first_difference": [None if d is None else d.position for d in result.divergences],
        "gap": [None if d is None else d.gap for d in result.divergences],
        "looping_tokens": [looping_tokens(text) for text in result.texts],
    }
    return row | asdict(run)


def generation_json(results: Sequence[FormatTexts], run: GenerationRun) -> bytes:
    """All formats as a JSON array of `generation_row`."""
    return json_array([generation_row(result, run) for result in results])


def generation_table(results: Sequence[FormatTexts], run: GenerationRun) -> Table:
    """All formats as a table that fits 80 columns; means over the prompts have their 95% interval below them."""
    table = new_table(
        f"{run.model}: {run.tokens} greedy tokens after each of {run.prompts} prompts of {run.prompt_tokens}",
        f"gap: of both log probabilities in 16 bit (nats); near tie: below {NEAR_TIE}\nbrackets: 95% intervals",
        *("format", "same\ntokens", "texts\nidentical", "near\nties", "median\ngap", "in a\nloop"),
        *(f"distinct\n{n}-grams" for n in DISTINCT[1:]),
    )
    for result in results:
        table.add_row(
            result.kv.name,
            with_interval(result.same_tokens, ".0f"),
            f"{result.identical} of {len(result.texts)}",
            f"{result.near_ties} of {len(result.gaps)}",
            "-" if result.median_gap is None else f"{result.median_gap:.3f}",
            with_interval(percent(result.loop_rate), ".0f", "%"),
            *(with_interval(percent(result.distinct(n)), ".0f", "%") for n in DISTINCT[1:]),
        )
    return table
