"""Decode steps as CUDA graphs: where they can be, and how one is made.

There is one for 1, 2, 4 and 8 rows and for every multiple of 8 (`kernels.launches`). Rows that nobody is in are all
alike: the same token, nothing read from the cache, so that all of them together visit the experts of one token. That
is what filling up costs at most; a tile of the tensor core has 8 columns, whatever is in them. So few graphs do: 21
for up to 32 sequences, where one for every number would be 96, each of which takes its time at start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from subten.kernels.select import CACHED_ATTENTION, Implementation, Kernels

Step = Callable[[], tuple[Tensor, Tensor]]
"""Logits and results of a decode step (see `DecodeStep`), from device memory alone."""

_OF_A_STEP = ("rms_norm", "linear")
"""Operations of a model that every decode step has; with experts `moe` is one more. RoPE is a part of attention."""


def why_no_graphs(device: torch.device, kernels: Kernels, attention: Implementation, experts: bool) -> str | None:
    """Why a decode step of a model (with experts or without) can't be captured, or None when it can be."""
    if device.type != "cuda":
        return f"the model is on a {device.type} device"
    if not attention.capturable:
        return f"{CACHED_ATTENTION}={attention.name} reads back to the host"
    for operation in (*_OF_A_STEP, "moe") if experts else _OF_A_STEP:
        if operation in kernels.uncapturable:
            return f"{operation}={kernels.chosen[operation]} reads back to the host"
    return None


@dataclass(frozen=True)
class Recorded:
    """A step that can be taken again.

    Attributes:
        replay: takes it.
        logits: where it leaves them, float32 [rows, vocab].
        results: likewise, int64 [2, rows].
    """

    replay: Callable[[], object]
    logits: Tensor
    results: Tensor


class Recorder(Protocol):
    """Makes a step one that can be taken again. While it does, the step is taken any number of times."""

    def __call__(self, step: Step) -> Recorded:
        """Of this step."""


class GraphRecorder:
    """A CUDA graph for each step. All share one memory pool: one step runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Recorded:
        """Take the step once, as compiling and choosing algorithms can't be captured, then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits, results = step()
        return Recorded(graph.replay, logits, results)
