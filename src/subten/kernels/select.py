"""Choosing an implementation for every operation, once: when a model is built, and of the attention over a cache when
the cache is allocated, as it depends on how the cache is laid out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from subten.errors import KernelUnavailableError
from subten.formats.layout import PageLayout
from subten.kernels.attention.device_cache import CODED_AHEAD, refusal
from subten.kernels.attention.gluon_plan import why_not_gluon
from subten.kernels.moe.gluon_plan import shape_refusal
from subten.kernels.moe.inputs import MoEWeights
from subten.kernels.moe.plan import size_refusal

log = logging.getLogger(__name__)

CACHED_ATTENTION = "cached_attention"
"""The operation that `select_attention` chooses: attention of all layers over one cache. Its function takes one
`LayerCache` per layer and returns a `PagedAttention`."""


@dataclass(frozen=True)
class Use:
    """What an implementation is wanted for.

    Attributes:
        device: where the tensors are.
        dtype: of the activations; None where that is not known yet.
        layouts: of the pages of a cache; none for operations that see no cache, or where it is not known yet.
        experts: hidden and intermediate size of the experts of a model; none where there are none, or it is not known
            yet.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    layouts: tuple[PageLayout, ...] = ()
    experts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Implementation:
    """One way to compute one operation."""

    operation: str
    """One of `OPERATIONS`."""
    name: str
    """"torch" for the reference; otherwise what it is written in."""
    devices: frozenset[str]
    """torch device types it is written for."""
    load: Callable[[], Callable[..., Any]]
    """Imports its module and returns the function: called only for the implementation that was chosen."""
    unavailable: Callable[[Use], str | None]
    """Why it can't be used so (on a device of a type in `devices`), or None when it can."""
    ahead: int = 0
    """`PageLayout.ahead` of the caches it writes to."""
    pack: Callable[[], Callable[[Any], Any]] | None = None
    """Imports and returns what puts the weights of one block into the form that it takes, in place, when a model is
    loaded; None: as they are."""
    capturable: bool = True
    """Whether a CUDA graph can hold it in a decode step: its launches depend on shapes alone, and the host reads
    nothing back."""


@dataclass(frozen=True)
class Kernels:
    """The chosen implementation of each operation of a model; the signatures are those of the torch references."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    linear: Callable[..., Tensor]
    moe: Callable[..., Tensor]
    dense_attention: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    pack_experts: Callable[[MoEWeights], MoEWeights]
    """Puts experts into the form that `moe` takes, in place; the tensors that it was given are not to be used."""
    chosen: Mapping[str, str]
    """Operation -> name of its implementation."""
    uncapturable: frozenset[str]
    """Operations whose implementation a CUDA graph can't hold, see `Implementation.capturable`."""


_NO_OPERATIONS = ("pack_experts", "chosen", "uncapturable")
_OF_MODEL = tuple(field.name for field in fields(Kernels) if field.name not in _NO_OPERATIONS)
OPERATIONS: tuple[str, ...] = (*_OF_MODEL, CACHED_ATTENTION)


def _load(path: str) -> Callable[..., Any]:
    module, function = path.rsplit(".", 1)
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded


def _reference(operation: str, path: str, *, capturable: bool = True) -> Implementation:
    return Implementation(
        operation=operation,
        name="torch",
        devices=frozenset({"cpu", "cuda"}),
        load=partial(_load, path),
        unavailable=lambda _use: None,
        capturable=capturable,
    )


_TRITON_PAGED = "subten.kernels.attention.triton_paged.TritonPagedAttention"
_GLUON_MOE = "subten.kernels.moe.gluon_moe"
_GLUON_DECODE = "subten.kernels.attention.gluon_decode.DECODE"
_GLUON_PREFILL = "subten.kernels.attention.gluon_prefill.CheckedPrefill"


def _attention(name: str, device: str, load: Callable[[], Any], unavailable: Callable[[Use], str | None]) -> Any:
    return Implementation(CACHED_ATTENTION, name, frozenset({device}), load, unavailable, CODED_AHEAD)


def _gluon_attention() -> Callable[..., Any]:
    return partial(_load(_TRITON_PAGED), decode=_load(_GLUON_DECODE), prefill=_load(_GLUON_PREFILL)())


def _moe(
    name: str,
    device: str,
    path: str,
    unavailable: Callable[[Use], str | None] = lambda _use: None,
    pack: str | None = None,
) -> Implementation:
    packing = partial(_load, pack) if pack else None
    return Implementation("moe", name, frozenset({device}), partial(_load, path), unavailable, pack=packing)


def _linear(name: str, unavailable: Callable[[Use], str | None]) -> Implementation:
    path = f"subten.kernels.linear.{name}_linear.LINEAR"
    return Implementation("linear", name, frozenset({"cuda"}), partial(_load, path), unavailable)


def _no_triton(use: Use) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if use.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it runs in Triton's interpreter only, for tests (TRITON_INTERPRET=1)"
    if use.device.type == "cuda" and torch.cuda.get_device_capability(use.device) < (8, 0):
        return "it needs compute capability 8.0 or more"
    if use.dtype == torch.float64:
        return "it computes in float32, and the model in float64"
    return next((reason for reason in map(refusal, use.layouts) if reason), None)


def _no_triton_moe(use: Use) -> str | None:
    return _no_triton_linear(use) or next((reason for sizes in use.experts if (reason := size_refusal(*sizes))), None)


def _no_triton_linear(use: Use) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(use.device) < (8, 0):
        return "it needs compute capability 8.0 or more"
    if use.dtype not in (None, torch.bfloat16, torch.float16):
        return f"it multiplies in 16 bit, and the model in {str(use.dtype).removeprefix('torch.')}"
    return None


def _no_sm_90(use: Use) -> str | None:
    if torch.cuda.get_device_capability(use.device) != (9, 0):
        return "it is written for compute capability 9.0"
    return None


def _no_gluon_linear(use: Use) -> str | None:
    return _no_sm_90(use) or _no_triton_linear(use)


def _no_gluon_moe(use: Use) -> str | None:
    refused = (reason for sizes in use.experts if (reason := shape_refusal(*sizes)))
    return _no_sm_90(use) or _no_triton_moe(use) or next(refused, None)


def _no_gluon(use: Use) -> str | None:
    refused = (reason for reason in map(why_not_gluon, use.layouts) if reason)
    return _no_sm_90(use) or _no_triton(use) or next(refused, None)


REGISTRY: tuple[Implementation, ...] = (
    _reference("rms_norm", "subten.kernels.norm.rms_norm_reference"),
    _reference("rope", "subten.kernels.rope.rope_reference"),
    _linear("gluon", _no_gluon_linear),
    _linear("triton", _no_triton_linear),
    _reference("linear", "subten.kernels.linear.reference.linear_reference"),
    _moe("gluon", "cuda", f"{_GLUON_MOE}.MOE", _no_gluon_moe, f"{_GLUON_MOE}.pack"),
    _moe("triton", "cuda", "subten.kernels.moe.triton_moe.MOE", _no_triton_moe),
    _moe("unfused", "cuda", "subten.kernels.moe.unfused.moe_unfused"),
    _reference("moe", "subten.kernels.moe.reference.moe_reference", capturable=False),
    # Only where it is asked for: a token's bits depend on those beside it.
    _moe("gluon-float", "cuda", f"{_GLUON_MOE}.FLOAT", _no_gluon_moe, f"{_GLUON_MOE}.pack"),
    # Behind the reference, which visits only the experts that were chosen.
    _moe("unfused", "cpu", "subten.kernels.moe.unfused.moe_unfused"),
    _reference("dense_attention", "subten.kernels.attention.dense.dense_attention_reference", capturable=False),
    _attention("gluon", "cuda", _gluon_attention, _no_gluon),
    _attention("triton", "cuda", partial(_load, _TRITON_PAGED), _no_triton),
    _reference(CACHED_ATTENTION, "subten.kernels.attention.paged.TorchPagedAttention", capturable=False),
    # Behind the reference, as it is a thousand times slower: it runs on a CPU where it is asked for.
    _attention("triton", "cpu", partial(_load, _TRITON_PAGED), _no_triton),
)
"""Every implementation; of one operation, in order of preference."""


def select_kernels(
    device: torch.device,
    requested: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    experts: tuple[tuple[int, int], ...] = (),
) -> Kernels:
    """Choose the first implementation of each operation of a model that can run on `device`.

    What is known of the model goes into the choice, see `Use`.

    `requested` maps operations to implementation names. A requested implementation is used or refused, never
    replaced: `KernelUnavailableError` says why it can't run, or which names exist. The choice is logged at
    level info, with the reason for every implementation that was passed over. A request for `cached_attention` is
    only checked here, as far as it can be without a cache.
    """
    requested = requested or {}
    for operation in requested:
        if operation not in OPERATIONS:
            raise KernelUnavailableError(
                f"there is no operation {operation!r} to choose a kernel for, only {', '.join(OPERATIONS)}"
            )
    use = Use(device, dtype, experts=experts)
    if CACHED_ATTENTION in requested:
        _choose(CACHED_ATTENTION, use, requested[CACHED_ATTENTION])
    chosen = {operation: _logged(operation, use, requested.get(operation)) for operation in _OF_MODEL}
    functions: dict[str, Any] = {operation: choice.load() for operation, choice in chosen.items()}
    names = MappingProxyType({operation: choice.name for operation, choice in chosen.items()})
    uncapturable = frozenset(operation for operation, choice in chosen.items() if not choice.capturable)
    pack = chosen["moe"].pack
    return Kernels(
        **functions, pack_experts=pack() if pack else _as_they_are, chosen=names, uncapturable=uncapturable
    )


def _as_they_are(weights: MoEWeights) -> MoEWeights:
    return weights


def select_attention(use: Use, requested: str | None = None) -> Implementation:
    """Choose the attention over a cache: the first implementation that serves all its layouts, or the requested one.

    The choice is logged as those of `select_kernels` are.

    Raises:
        KernelUnavailableError: the requested implementation can't be used so, or does not exist.
    """
    return _logged(CACHED_ATTENTION, use, requested)


def _logged(operation: str, use: Use, name: str | None) -> Implementation:
    entry, passed_over = _choose(operation, use, name)
    log.info("%s on %s: %s%s", operation, use.device, entry.name, "".join(f" ({r})" for r in passed_over))
    return entry


def _choose(operation: str, use: Use, name: str | None) -> tuple[Implementation, list[str]]:
    """An implementation, and why others were passed over."""
    candidates = [entry for entry in REGISTRY if entry.operation == operation]
    if name is not None:
        existing = ", ".join(dict.fromkeys(entry.name for entry in candidates))
        candidates = [entry for entry in candidates if entry.name == name]
        if not candidates:
            raise KernelUnavailableError(f"there is no {operation} kernel {name!r}; there are {existing}")
    passed_over: list[str] = []
    for entry in candidates:
        reason = _why_not(entry, use)
        if reason is None:
            return entry, passed_over
        passed_over.append(f"not {entry.name}: {reason}")
    raise KernelUnavailableError(f"no {operation} kernel can run on {use.device}: {'; '.join(passed_over)}")


def _why_not(entry: Implementation, use: Use) -> str | None:
    if use.device.type not in entry.devices:
        return f"it is written for {' and '.join(sorted(entry.devices))} devices"
    return entry.unavailable(use)
