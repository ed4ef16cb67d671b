"""Choosing an implementation for every operation, once, when a model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subten.errors import KernelUnavailableError
from subten.kernels.attention.inputs import AttentionInputs, LayerCache, WideTokens
from subten.kernels.moe.inputs import MoEWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Implementation:
    """One way to compute one operation."""

    operation: str
    """The attribute of `Kernels` that it can fill."""
    name: str
    """"torch" for the reference; otherwise what it is written in."""
    devices: frozenset[str]
    """torch device types it is written for."""
    load: Callable[[], Callable[..., Any]]
    """Imports its module and returns the function: called only for the implementation that was chosen."""
    unavailable: Callable[[torch.device], str | None]
    """Why it can't run on this device (of a type in `devices`), or None when it can."""


@dataclass(frozen=True)
class Kernels:
    """The chosen implementation of each operation; the signatures are those of the torch references."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    moe: Callable[[Tensor, MoEWeights], Tensor]
    kv_append: Callable[[Tensor, Tensor, LayerCache, AttentionInputs], tuple[WideTokens, ...]]
    kv_attention: Callable[[Tensor, tuple[WideTokens, ...], LayerCache, AttentionInputs, float], Tensor]
    dense_attention: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    chosen: Mapping[str, str]
    """Operation -> name of its implementation."""


OPERATIONS: tuple[str, ...] = tuple(field.name for field in fields(Kernels) if field.name != "chosen")


def _reference(operation: str, path: str) -> Implementation:
    module, function = path.rsplit(".", 1)
    return Implementation(
        operation=operation,
        name="torch",
        devices=frozenset({"cpu", "cuda"}),
        load=lambda: getattr(import_module(module), function),
        unavailable=lambda _device: None,
    )


REGISTRY: tuple[Implementation, ...] = (
    _reference("rms_norm", "subten.kernels.norm.rms_norm_reference"),
    _reference("rope", "subten.kernels.rope.rope_reference"),
    _reference("linear", "subten.kernels.linear.linear_reference"),
    _reference("moe", "subten.kernels.moe.reference.moe_reference"),
    _reference("kv_append", "subten.kernels.attention.append.append_reference"),
    _reference("kv_attention", "subten.kernels.attention.attend.attend_reference"),
    _reference("dense_attention", "subten.kernels.attention.dense.dense_attention_reference"),
)
"""Every implementation; of one operation, in order of preference."""


def select_kernels(device: torch.device, requested: Mapping[str, str] | None = None) -> Kernels:
    """Choose the first implementation of each operation that can run on `device`.

    `requested` maps operations to implementation names. A requested implementation is used or refused, never
    replaced: `KernelUnavailableError` says why it can't run, or which names exist. The choice is logged at
    level info, with the reason for every implementation that was passed over.
    """
    requested = requested or {}
    for operation in requested:
        if operation not in OPERATIONS:
            raise KernelUnavailableError(
                f"there is no operation {operation!r} to choose a kernel for, only {', '.join(OPERATIONS)}"
            )
    chosen = {operation: _choose(operation, device, requested.get(operation)) for operation in OPERATIONS}
    functions: dict[str, Any] = {operation: choice.load() for operation, choice in chosen.items()}
    names = MappingProxyType({operation: choice.name for operation, choice in chosen.items()})
    return Kernels(**functions, chosen=names)


def _choose(operation: str, device: torch.device, name: str | None) -> Implementation:
    candidates = [entry for entry in REGISTRY if entry.operation == operation]
    if name is not None:
        existing = ", ".join(entry.name for entry in candidates)
        candidates = [entry for entry in candidates if entry.name == name]
        if not candidates:
            raise KernelUnavailableError(f"there is no {operation} kernel {name!r}; there are {existing}")
    passed_over: list[str] = []
    for entry in candidates:
        reason = _why_not(entry, device)
        if reason is None:
            log.info("%s on %s: %s%s", operation, device, entry.name, "".join(f" ({r})" for r in passed_over))
            return entry
        passed_over.append(f"not {entry.name}: {reason}")
    raise KernelUnavailableError(f"no {operation} kernel can run on {device}: {'; '.join(passed_over)}")


def _why_not(entry: Implementation, device: torch.device) -> str | None:
    if device.type not in entry.devices:
        return f"it is written for {' and '.join(sorted(entry.devices))} devices"
    return entry.unavailable(device)
