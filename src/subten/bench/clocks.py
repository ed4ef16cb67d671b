"""What a GPU's clock and power are while it is at work: steps of unequal length may be steps at unequal clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clocks:
    """At one moment.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        power_w: watts drawn.
    """

    sm_mhz: float
    power_w: float


def clocks_during(work: Callable[[], object], device: torch.device) -> Clocks | None:
    """As `nvidia-smi` reports them while `work` is done, again and again until it has; None where it can't tell."""
    path = shutil.which("nvidia-smi")
    if device.type != "cuda" or path is None:
        return None
    # By its name: the number of a device is another one where not all of them are visible.
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [path, which, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    with asked:
        work()
        while asked.poll() is None:
            work()
        text = asked.stdout.read() if asked.stdout else ""
    try:
        sm_mhz, power_w = map(float, text.strip().split(","))
    except ValueError:
        return None
    return Clocks(sm_mhz, power_w)
