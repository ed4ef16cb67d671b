"""Settings of the whole test run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

# Device kernels run in Triton's interpreter: what they compute can be checked without a GPU. Triton looks at this
# when it is imported, and transformers imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from subten.config import HOME_VARIABLE

# The default profile draws the same examples on every run and machine, so that a red run is red for everyone.
# `pytest --hypothesis-profile=explore` draws fresh ones, ten times as many.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile("repeatable")

# Tests run side by side (pytest-xdist) on tiny tensors: more threads only get into each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrations and pulled models belong to the run, not to whoever runs it; tests that fetch a real model keep it
    where it is for the next run."""
    if "network" not in request.keywords:
        monkeypatch.setenv(HOME_VARIABLE, str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Whatever was drawn before, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command sets logging up for its process, which other tests share: later lines, of threads or as warnings,
    would go to what the test's capture has closed."""
    root, package = logging.getLogger(), logging.getLogger("subten")
    handlers, level, package_level = root.handlers[:], root.level, package.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, package.level = handlers, level, package_level
