"""Device time of calls: a CUDA graph of many calls over buffers that the L2 can't hold, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

REPLAYS = 25
_GRAPH_US = 1500.0
"""A graph is made this long at least, so that what comes between two replays is no part of the figure."""
_MAX_ROUNDS = 64
_MIN_COPIES, _MAX_COPIES = 2, 160

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median over the replays of a graph, and the 10th and 90th percentile."""

    us: float
    us_p10: float
    us_p90: float
    replays: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of one figure per replay."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


Timer = Callable[[Sequence[Call], int], Timing]
"""As `time_calls`: of calls that are right, given the number of replays."""


def copies_past(cache_bytes: int, nbytes: int) -> int:
    """How many buffers of `nbytes` to rotate, so that none is in a cache of this size when its turn comes.

    Twice the cache, as its replacement is not known to be least recently used; never fewer than two.
    """
    return max(_MIN_COPIES, min(_MAX_COPIES, -(-2 * cache_bytes // nbytes)))


def time_calls(calls: Sequence[Call], replays: int = REPLAYS) -> Timing:
    """Time of one of these calls, each of which reads another buffer. They allocate from the graph's own pool.

    Replays are queued one behind the other, so that the device never waits for the host.
    """
    graph = _captured(calls, 1)
    once = statistics.median(_replay(graph, 3))
    rounds = max(1, min(_MAX_ROUNDS, round(_GRAPH_US / once)))
    if rounds > 1:
        graph = _captured(calls, rounds)
    return Timing.of([us / (rounds * len(calls)) for us in _replay(graph, replays)])


def _captured(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    # Compiling and choosing algorithms can't be captured: each call runs once before, on a stream of its own.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay, the first left out as warm-up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    for event in events:
        event.record()
        if event is not events[-1]:
            graph.replay()
    torch.cuda.synchronize()
    return [1000 * a.elapsed_time(b) for a, b in pairwise(events[1:])]
