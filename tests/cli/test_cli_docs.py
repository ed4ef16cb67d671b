"""docs/cli.md names every command and option, and every key of the JSON rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from subten.cli.app import app
from subten.engine import CacheUsage
from subten.evals.quality import FormatQuality, WindowResult
from subten.evals.report import Run, json_row
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
    assert {"subten run", "subten pull", "subten info", "subten calibrate", "subten eval kv", "subten demo"} == set(
        found
    )
    for name, command in found.items():
        text = section(name) + COMMON
        missing = {option for option in options(command) if not re.search(rf"{option}\b", text)}
        assert not missing, f"{name}: {missing}"
    assert all(option in COMMON for option in options(root))


def test_every_documented_option_exists() -> None:
    root = typer.main.get_command(app)
    known = options(root).union(*(options(command) for _, command in commands(root, "subten")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOCUMENT)) <= known


def test_every_key_of_the_rows_is_documented() -> None:
    window = WindowResult(3.0, 3.0, 0.0, 1.0, CacheUsage(8, 64, 64, 128))
    row = json_row(FormatQuality(get_format("kv2"), (window,)), Run(*[""] * 3, 8, 8, 0, "window", 8, "", ""))
    documented = set(re.findall(r"`(\w+)`", section("subten eval kv")))
    assert set(row) <= documented
