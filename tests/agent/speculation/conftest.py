from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from subten.agent.sandbox import MicroVMTemplate, Pool, ProcessTemplate, find_image
from subten.agent.sandbox.microvm import Image, why_no_machine
from subten.agent.sandbox.process import unavailable

IMAGE = find_image()
"""Looked for here: a test's own home, which it gets later, has none."""

SOURCE = "def add(a, b):\n    return a - b\n"
TESTS = """\
import unittest

from calc import add


class AddTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(add(1, 2), 3)

    def test_nothing(self):
        self.assertEqual(add(0, 0), 0)
"""


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "calc.py").write_text(SOURCE)
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_calc.py").write_text(TESTS)
    (folder / "old").mkdir()
    (folder / "old" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "old" / "run.sh").chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def process_template(repository: Path) -> Iterator[ProcessTemplate]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with ProcessTemplate(repository) as template:
        yield template


@pytest.fixture(scope="session")
def pool(process_template: ProcessTemplate) -> Iterator[Pool]:
    with Pool(process_template, size=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def image() -> Image:
    reason = why_no_machine()
    if reason is None and IMAGE is None:
        reason = "there is no guest image; make one with: subten agent build-image"
    if reason is not None:
        pytest.skip(reason)
    assert IMAGE is not None
    return IMAGE


@pytest.fixture(scope="session")
def machines(repository: Path, image: Image) -> Iterator[Pool]:
    with MicroVMTemplate(repository, image=image) as template, Pool(template, size=2) as pool:
        yield pool
