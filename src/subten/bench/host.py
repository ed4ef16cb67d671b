"""The machine of measurements that need no GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import subten
from subten.bench.machine import source_commit


def describe_host(commit: str | None = None) -> dict[str, Any]:
    """Processor, load before the measurement, and versions.

    Args:
        commit: of the source, where git can't tell.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "subten": subten.__version__,
        "commit": commit or source_commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
