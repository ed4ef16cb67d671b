"""docs/one-token.md and docs/engine.md name files and functions; each must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT, ENGINE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("one-token.md", "engine.md"))
HOPS = re.findall(r"`(src/subten/[\w/]+\.py)`\s+`([\w.]+)`", TEXT + ENGINE)


def names_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_the_walk_has_every_step() -> None:
    assert len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) == 15
    assert len(HOPS) >= 15


@pytest.mark.parametrize(("file", "name"), HOPS)
def test_hop_exists(file: str, name: str) -> None:
    assert name in names_of(ROOT / file)


def test_the_tests_that_the_engine_rests_on_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", ENGINE)
    assert named
    assert all((ROOT / name).is_file() for name in named)
