"""Retrieval as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from subten.evals.figures import Computation, json_array, json_figures, new_table, percent, with_interval
from subten.evals.metrics import CONFIDENCE
from subten.evals.retrieval import FormatRetrieval


@dataclass(frozen=True, kw_only=True)
class RetrievalRun(Computation):
    """What all rows of one evaluation share; each field is a key of every JSON row.

    Attributes:
        context: tokens that list, question and answer may take.
        omitted: lengths of lists that do not fit, and the tokens that they take.
        seed: of keys and values.
        prefill: visibility rule of the prompt chunks, "window" or "chunk".
        chunk_size: tokens in a prompt chunk.
    """

    context: int
    omitted: Mapping[int, int]
    seed: int
    prefill: str
    chunk_size: int


def retrieval_row(result: FormatRetrieval, run: RetrievalRun) -> dict[str, Any]:
    """One format on lists of one length as a JSON object; log probabilities are in nats."""
    estimates = {
        "recall": result.recall,
        "same_answer": result.same_answer,
        "log_probability": result.log_probability,
        "log_probability_change": result.change,
    }
    row: dict[str, Any] = {"format": result.kv.name, "lines": result.lines, "trials": len(result.trials)}
    row |= {"prompt_tokens": max(len(trial.prompt) for trial in result.trials)}
    row |= {"sinks": result.kv.sinks, "recent": result.kv.recent, "asked_in_codes": result.asked_in_codes}
    return row | json_figures(estimates) | {"confidence": CONFIDENCE} | asdict(run)


def retrieval_json(results: Sequence[FormatRetrieval], run: RetrievalRun) -> bytes:
    """All results as a JSON array of `retrieval_row`."""
    return json_array([retrieval_row(result, run) for result in results])


def retrieval_table(results: Sequence[FormatRetrieval], run: RetrievalRun) -> Table:
    """All results as a table that fits 80 columns, one section for each length of list."""
    too_long = ", ".join(f"{lines} lines ({tokens} tokens)" for lines, tokens in run.omitted.items())
    note = f"\nlists too long for the context of {run.context}:\n{too_long}" if too_long else ""
    table = new_table(
        f"{run.model}: a value from a list, {len(results[0].trials)} trials, prefill {run.prefill}",
        f"brackets: 95% intervals{note}",
        *("format", "lines", "asked line\nin codes", "recall", "answer\nas 16 bit"),
        *("log p of\nthe value", "change\n(nats)"),
    )
    for index, result in enumerate(results):
        table.add_row(
            result.kv.name,
            f"{result.lines}",
            f"{result.asked_in_codes:.0%}",
            with_interval(percent(result.recall), ".0f", "%"),
            with_interval(percent(result.same_answer), ".0f", "%"),
            f"{result.log_probability.value:.2f}",
            with_interval(result.change, "+.2f"),
            end_section=index + 1 < len(results) and results[index + 1].lines != result.lines,
        )
    return table
