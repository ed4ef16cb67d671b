"""The kernels run in Triton's interpreter; what would be timed on a GPU is called once instead."""

from __future__ import annotations

import itertools
import os
import sys
import time
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from subten.bench import peers
from subten.bench.machine import Machine
from subten.bench.timing import Timing
from support.device_code import quicken_interpreter

US = 8.0


@pytest.fixture
def machine() -> Machine:
    return Machine(
        device="a GPU",
        capability="9.0",
        num_sms=2,
        l2_bytes=1 << 18,
        memory_bytes=1 << 30,
        driver=None,
        cuda="13.0",
        cudnn=None,
        torch="2",
        triton="3",
        python="3",
        subten="0",
        commit=None,
        read_tb_per_s=2.0,
    )


@pytest.fixture
def hasty_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the benchmarks alone 40 s go by between two looks at the clock: an event loop in a thread of another test's
    server would wait for hours by such a clock."""
    from subten.bench import latency_session, prefill_session  # noqa: F401  # what commands import when they run

    seconds = itertools.count(0, 40)
    hasty = SimpleNamespace(**{**vars(time), "monotonic": lambda: next(seconds)})
    for name, module in list(sys.modules.items()):
        if name.startswith("subten.bench.") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", hasty)


class TimedCalls:
    """Instead of a timer: every figure is 8 us.

    Attributes:
        counts: calls of each figure.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, calls, replays=25) -> Timing:
        self.counts.append(len(calls))
        calls[-1]()
        return Timing(US, US - 1, US + 1, replays)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> TimedCalls:
    quicken_interpreter(monkeypatch)
    timer = TimedCalls()
    monkeypatch.setattr(peers, "time_calls", timer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timer
