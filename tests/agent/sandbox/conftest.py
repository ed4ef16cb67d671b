"""Sandboxes to test: every test that asks for `template` runs on both tiers.

A tier that this machine has not got is skipped, and says what to install.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from subten.agent.sandbox import Clone, MicroVMTemplate, ProcessTemplate, Template, find_image
from subten.agent.sandbox.microvm import Image, why_no_machine, why_not_buildable
from subten.agent.sandbox.process import unavailable
from support.sandbox import LIMITS, SETUP


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "src").mkdir()
    (folder / "src" / "main.py").write_text("print('hello')\n")
    (folder / "notes.txt").write_text("one\ntwo\nthree\n")
    (folder / "data.bin").write_bytes(bytes(range(256)))
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("src/main.py")
    (folder / ".git" / "hooks").mkdir(parents=True)
    (folder / ".git" / "config").write_text("[core]\n")
    return folder


IMAGE = find_image()
"""Looked for here: a test's own home, which it gets later, has none."""


@pytest.fixture(scope="session")
def image() -> Image:
    reason = why_no_machine()
    if reason is None and IMAGE is None:
        reason = why_not_buildable() or "there is no guest image; make one with: subten agent build-image"
    if reason is not None:
        pytest.skip(reason)
    assert IMAGE is not None
    return IMAGE


@pytest.fixture(scope="session")
def process_template(workspace: Path) -> Iterator[ProcessTemplate]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with ProcessTemplate(workspace, limits=LIMITS) as template:
        yield template


@pytest.fixture(scope="session")
def microvm_template(workspace: Path, image: Image) -> Iterator[MicroVMTemplate]:
    with MicroVMTemplate(workspace, limits=LIMITS, image=image, setup=SETUP) as template:
        yield template


@pytest.fixture(params=["process", "microvm"])
def template(request: pytest.FixtureRequest) -> Template:
    chosen: Template = request.getfixturevalue(f"{request.param}_template")
    return chosen


@pytest.fixture
def clone(template: Template) -> Iterator[Clone]:
    with template.clone() as clone:
        yield clone
