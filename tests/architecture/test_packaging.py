"""What is installed is what was tested."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_every_library_that_is_named_has_its_tested_version_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [text for own in (project["dependencies"], *project["optional-dependencies"].values()) for text in own]
    named = [own for own in map(Requirement, texts) if own.name != "subten"]
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    tested = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert set(tested) == {canonicalize_name(own.name) for own in named}
    for own in named:
        assert own.specifier.contains(tested[canonicalize_name(own.name)]), own
