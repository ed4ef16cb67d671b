"""Settings of the whole test run."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# The default profile draws the same examples on every run and machine, so that a red run is red for everyone.
# `pytest --hypothesis-profile=explore` draws fresh ones, ten times as many.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile("repeatable")

# Tests run side by side (pytest-xdist) on tiny tensors: more threads only get into each other's way.
torch.set_num_threads(1)
