"""Compile what decode steps are made of, in as many processes as there are cores, before the steps are measured.

Each process takes steps of the first layers of a model: what is compiled depends on the kinds of layers, not on how
many there are. The cache is one page, which all sequences say they consist of.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from subten.bench import model_shapes
from subten.bench.filled_cache import CacheKind
from subten.bench.latency_cases import LatencyCase, MoE, with_moe
from subten.bench.processes import in_processes
from subten.bench.random_model import ExpertScales, random_model, random_model_calibration
from subten.engine.decode_rows import DecodeWork, Draw
from subten.engine.loading import LoadedModel, choose_dtype
from subten.engine.runner import Runner
from subten.engine.sampling import SamplingParams
from subten.kvcache import AppendPlan, CopyPlan

_LAYERS = 2


@dataclass(frozen=True)
class AheadTask:
    """One kind of step to compile.

    Attributes:
        case: what it is a step of.
        scales: of the experts' weights.
        params: how tokens are chosen.
        mean_key: whether keys are coded without their mean.
    """

    case: LatencyCase
    scales: ExpertScales
    params: SamplingParams
    mean_key: bool


def compile_steps_ahead(tasks: Sequence[AheadTask], seconds: float | None) -> str:
    """As many as are done in so many seconds; see `in_processes`."""
    return in_processes([partial(take_step, task) for task in tasks], seconds, "steps")


def take_step(task: AheadTask, device: torch.device | None = None) -> None:
    """Of this kind, once; by default on the GPU of the process, whatever comes of it."""
    if device is not None:
        _take_step(task, device)
        return
    with suppress(Exception):
        _take_step(task, torch.device("cuda", torch.cuda.current_device()))


def _take_step(task: AheadTask, device: torch.device) -> None:
    case, draw = task.case, Draw(task.params, 0)
    model = _model(case.shape, task.scales, case.moe, device)
    kind = CacheKind.of(model, case.kv, case.context)
    calibration = None
    if case.kv.calibrated:
        calibration = random_model_calibration(case.kv, model, mean_key=task.mean_key)
    runner = Runner(
        model, kind.layout, 1, case.batch, calibration, "chunk", kind.choice.load(), case.batch, case.context
    )
    pages = [0] * kind.layout.pages_for(case.context)
    runner.decode(
        [
            DecodeWork(row, AppendPlan(case.context - 1, 1, pages, row, CopyPlan()), 0, draw)
            for row in range(case.batch)
        ]
    )


@lru_cache(maxsize=1)
def _model(shape: str, scales: ExpertScales, moe: MoE, device: torch.device) -> LoadedModel:
    spec = model_shapes.SHAPES[shape]
    few = replace(spec, feed_forwards=spec.feed_forwards[:_LAYERS])
    return with_moe(random_model(shape, few, scales, choose_dtype("auto", device), device), moe)[0]
