"""Which kernels a decode step consists of, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from subten.bench.latency_report import KernelTime, Profile

_SHOWN = 12
_STEPS = 4
_COPIES = ("Memcpy", "Memset")
"""All that is seen of a graph, where its kernels are not."""


def profile_step(graph: Callable[[], object], eager: Callable[[], object], device: torch.device) -> Profile:
    """A step by kernels: of `graph`, which takes one as it is served, or else of `eager`, which takes it kernel by
    kernel. On a CPU, by torch's operations.

    The profiler stays in the process and may slow what comes after it.
    """
    found, of = _kernels(graph, device), "graph"
    if all(kernel.name.startswith(_COPIES) for kernel in found):
        found, of = _kernels(eager, device), "eager"
    found.sort(key=lambda kernel: -kernel.us)
    return Profile(of, sum(k.launches for k in found), sum(k.us for k in found), found[:_SHOWN])


def _kernels(step: Callable[[], object], device: torch.device) -> list[KernelTime]:
    on_gpu = device.type == "cuda"
    step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    return [
        KernelTime(
            event.key,
            event.count / _STEPS,
            float(event.self_device_time_total if on_gpu else event.self_cpu_time_total) / _STEPS,
        )
        for event in seen.key_averages()
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
    ]
