"""What documents name exists: files, anchors, options, variables; and what exists is named."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import subten
from subten.bench.__main__ import app as bench
from subten.cli.app import app as cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "agent_tasks" / "README.md",
    ROOT / "src" / "subten" / "demo_model" / "MODEL_CARD.md",
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
PROSE = {
    page: re.sub(r"^(`{3,})[^\n]*\n.*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
PYTHON = TEXTS[ROOT / "docs" / "python.md"]
ELSEWHERE = {
    *("--characters", "--against", "--folder", "--texts", "--out"),  # tools.demo_moe.eval_heldout
    *("--force", "--hypothesis-profile", "--no-deps"),  # git, pytest, pip
}
"""Options in documents that are those of other programs."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(PROSE[linked]), target


@each_page
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`(?:python )?((?:src|tests|tools|docs|examples|benchmarks)/[\w./*-]+)`", PROSE[page])
    for path in named:
        # NAME stands for whatever a reader calls a file.
        assert "NAME" in path or any(ROOT.glob(path.rstrip("/"))), path


@each_page
def test_tables_have_a_head_and_equal_rows(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PROSE[page], re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", re.sub(r"`[^`\n]*`", "code", row)) for row in table.splitlines()]
        assert len(rows) > 1, table
        assert all(re.fullmatch(r" ?:?-+:? ?", cell) for cell in rows[1][1:-1]), table
        assert {len(row) for row in rows} == {len(rows[0])}, table


def commands(command: Any) -> Iterator[Any]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from commands(child)


def options(app: typer.Typer) -> set[str]:
    found = {
        name
        for command in commands(typer.main.get_command(app))
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return {name for name in found if name.startswith("--")} - {"--install-completion", "--show-completion"}


@each_page
def test_named_options_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXTS[page]))
    assert named <= options(cli) | options(bench) | ELSEWHERE


def test_options_of_benchmarks_are_documented() -> None:
    text = "".join(TEXTS.values())
    assert {name for name in options(bench) if not re.search(rf"`[^`\n]*{name}\b", text)} == set()


def test_named_modules_and_tools_can_be_run() -> None:
    for text in TEXTS.values():
        for module in re.findall(r"python -m ((?:subten|tools)[\w.]*)", text):
            path = Path(*(("src",) if module.startswith("subten") else ()), *module.split("."))
            assert (ROOT / path.with_suffix(".py")).is_file() or (ROOT / path / "__main__.py").is_file(), module
        for tool in re.findall(r"python (tools/[\w/]+\.py)", text):
            assert (ROOT / tool).is_file(), tool


def test_named_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for text in TEXTS.values():
        named = set(re.findall(r"`make ([\w-]+)`", text))
        assert named <= targets


def test_named_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    for text in TEXTS.values():
        for named in re.findall(r"subten\[([\w,]+)\]", text):
            assert set(named.split(",")) <= extras, named


def test_every_result_is_shown_somewhere() -> None:
    text = "".join(TEXTS.values())
    patterns = re.findall(r"results/([\w*]+\.json)", text)
    results = ROOT / "benchmarks" / "results"
    shown = {path for pattern in patterns for path in results.glob(pattern)}
    assert set(results.glob("*.json")) == shown


def test_every_variable_of_the_environment_is_documented() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"\bSUBTEN_[A-Z]+(?:_[A-Z]+)*_?", sources)) - {"SUBTEN_SERVE_X"}
    documented = set(re.findall(r"\bSUBTEN_[A-Z_]+", "".join(TEXTS.values())))
    assert {name for name in named if not name.startswith("SUBTEN_SERVE_")} <= documented
    assert "SUBTEN_SERVE_" in named & documented


def fields(part: str) -> set[str]:
    section = PYTHON.partition(f"## `{part}`\n")[2].partition("\n## ")[0]
    return {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }


def test_all_that_the_package_exports_is_documented() -> None:
    assert {name for name in subten.__all__ if f"`{name}`" not in PYTHON} == {"__version__"}
    for exported in (subten.Delta, subten.Completion):
        assert all(f"`{field.name}`" in PYTHON for field in dataclasses.fields(exported))
    methods = {name for name in vars(subten.LLM) if not name.startswith("_") and callable(vars(subten.LLM)[name])}
    assert {name for name in methods if f"`{name}`" not in PYTHON} == set()


def test_all_that_can_be_asked_for_is_documented_and_nothing_else() -> None:
    assert fields("SamplingParams") == {field.name for field in dataclasses.fields(subten.SamplingParams)}
    asked = set(inspect.signature(subten.LLM).parameters)
    of_models = set(inspect.signature(subten.load_model).parameters) - {"model"}
    assert fields("LLM") == asked - of_models
    assert of_models <= asked
    assert all(f"`{name}`" in PYTHON for name in of_models)


def test_docstrings_name_files_that_exist() -> None:
    files = {path.name for top in ("src", "tests", "tools", "docs", "examples") for path in (ROOT / top).rglob("*.*")}
    for path in (ROOT / "src").rglob("*.py"):
        first = re.match(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
        for name in re.findall(r"(?<![\w/.])(\w+\.(?:py|md))\b", first[1] if first else ""):
            assert name in files, f"{path.name}: {name}"
        for document in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", first[1] if first else ""):
            assert (ROOT / document).is_file(), f"{path.name}: {document}"
