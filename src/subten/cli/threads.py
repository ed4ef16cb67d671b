"""How many threads compute on a CPU."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subten.engine import LoadedModel

log = logging.getLogger(__name__)

SMALL = 1 << 28
"""Bytes of weights. One thread decodes models of 139 and of 538 MB as fast as two do, but what prompts gain by two
counts for more with the larger one (benchmarks/results/cpu_threads.json)."""
_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def suit_threads(model: LoadedModel) -> None:
    """One thread for a small model on a CPU, unless the environment says how many. Threads of an operation wait for
    each other, and where other programs keep the cores busy, each of the many small ones waits for a turn."""
    import torch

    from subten.models.weight_bytes import bytes_held

    if model.device.type != "cpu" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    if bytes_held(model.decoder.weights) < SMALL:
        torch.set_num_threads(1)
        log.info("a small model is computed by one thread; OMP_NUM_THREADS asks for more")
