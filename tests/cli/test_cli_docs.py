"""docs/cli.md names every command and option, and every key of the JSON rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from subten.cli.app import app
from subten.engine import CacheUsage
from subten.evals.generation import FormatTexts
from subten.evals.generation_report import GenerationRun, generation_row
from subten.evals.layers_report import layers_rows
from subten.evals.quality import FormatQuality, WindowResult
from subten.evals.report import Run, json_row
from subten.evals.retrieval import Answer, FormatRetrieval, Trial
from subten.evals.retrieval_report import RetrievalRun, retrieval_row
from subten.formats import get_format

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMON = re.split(r"^## ", DOCUMENT, flags=re.M)[0]
HELP = {"--help", "-h", "--install-completion", "--show-completion"}


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name."""
    children = getattr(command, "commands", {})
    for child_name, child in children.items():
        yield from commands(child, f"{name} {child_name}")
    if not children:
        yield name, command


def section(name: str) -> str:
    found = re.search(rf"^## `{name}\b.*?(?=^## |\Z)", DOCUMENT, flags=re.M | re.S)
    assert found is not None, f"{name} has no section"
    return found[0]


def options(command: Any) -> set[str]:
    named = {o for parameter in command.params for o in (*parameter.opts, *parameter.secondary_opts)}
    return {option for option in named if option.startswith("-")} - HELP


def test_every_command_and_option_is_documented() -> None:
    root = typer.main.get_command(app)
    found = dict(commands(root, "subten"))
    assert set(found) == {
        *("subten run", "subten serve", "subten pull", "subten info", "subten calibrate", "subten demo"),
        *("subten agent check", "subten agent doctor", "subten agent build-image", "subten agent mcp"),
        *("subten agent run", "subten agent replay"),
        *("subten bench latency", "subten bench prefill", "subten bench itl", "subten bench report"),
        *("subten eval kv", "subten eval retrieval", "subten eval generate", "subten eval layers"),
    }
    for name, command in found.items():
        text = section(name) + COMMON
        missing = {option for option in options(command) if not re.search(rf"{option}\b", text)}
        assert not missing, f"{name}: {missing}"
    assert all(option in COMMON for option in options(root))


def test_every_documented_option_exists() -> None:
    root = typer.main.get_command(app)
    known = options(root).union(*(options(command) for _, command in commands(root, "subten")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOCUMENT)) <= known


COMPUTED = {"model": "", "fingerprint": "", "dtype": "", "device": ""}
RULE = {"prefill": "window", "chunk_size": 8}
RUN = Run(**COMPUTED, **RULE, text_sha256="", context=8, tokens=8, decode_tail=0)
QUALITY = FormatQuality(get_format("kv2"), (WindowResult(3.0, 3.0, 0.0, 1.0, CacheUsage(8, 64, 64, 128)),))
TRIAL = Trial((1,), (1,), range(1))


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("subten eval kv", json_row(QUALITY, RUN)),
        (
            "subten eval retrieval",
            retrieval_row(
                FormatRetrieval(get_format("kv2"), 1, (TRIAL,), (Answer(0.0, (1,)),), (Answer(0.0, (1,)),)),
                RetrievalRun(**COMPUTED, **RULE, context=8, omitted={}, seed=0),
            ),
        ),
        (
            "subten eval generate",
            generation_row(
                FormatTexts(get_format("kv2"), ((1,),), (None,)),
                GenerationRun(**COMPUTED, **RULE, text_sha256="", prompts=1, prompt_tokens=1, tokens=1),
            ),
        ),
        ("subten eval layers", layers_rows([QUALITY, QUALITY], RUN)[0]),
    ],
)
def test_every_key_of_the_rows_is_documented(command: str, row: dict[str, Any]) -> None:
    # What all rows have in common is explained once, with `eval kv`.
    documented = set(re.findall(r"`(\w+)`", section(command)))
    assert set(row) <= documented | set(re.findall(r"`(\w+)`", section("subten eval kv")))
    own = set(row) - set(json_row(QUALITY, RUN))
    assert own <= documented
