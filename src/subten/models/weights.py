"""Reading a decoder's weights from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from subten.checkpoints.checkpoint import Checkpoint
from subten.errors import CheckpointError
from subten.models.families import FAMILIES
from subten.models.spec import DecoderSpec, MoESpec
from subten.models.weight_tree import ModelWeights, assemble_weights

IGNORED_TENSORS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Stored tensors that are no weights: older checkpoints hold the rotary frequencies, which `RopeSpec` gives."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, and how many of them a token passes through; tied embeddings count once."""

    total: int
    active: int


def load_weights(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read the weights that `spec` asks for; every tensor of the checkpoint is used exactly once.

    `progress` is called as progress(read, total) after each checkpoint tensor. Raises CheckpointError, before
    anything is read, if tensors are missing, left over, or of the wrong shape.
    """
    if FAMILIES[spec.family].names.output not in checkpoint.names():
        return _load(checkpoint, spec, dtype, device, progress)
    weights = _load(checkpoint, replace(spec, tied_embeddings=False), dtype, device, progress)
    # Some checkpoints of models with tied embeddings store the matrix under both names. Where the two differ, the
    # configuration is wrong about the tie (transformers 5 decides so as well).
    tied = spec.tied_embeddings and torch.equal(weights.output, weights.embedding)
    return replace(weights, output=weights.embedding) if tied else weights


def required_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must hold."""
    shapes: dict[str, tuple[int, ...]] = {}

    def take(shape: tuple[int, ...], parts: tuple[str, ...]) -> Tensor:
        shapes.update(dict.fromkeys(parts, _part_shape(shape, len(parts))))
        return torch.empty(shape, device="meta")

    assemble_weights(spec, take)
    return shapes


def count_parameters(spec: DecoderSpec) -> ParameterCount:
    """Count the parameters of a model from its spec alone."""
    total = sum(prod(shape) for shape in required_tensors(spec).values())
    idle = sum(
        (moe.router.num_experts - moe.router.top_k) * 3 * spec.hidden_size * moe.intermediate_size
        for moe in spec.feed_forwards
        if isinstance(moe, MoESpec)
    )
    return ParameterCount(total, total - idle)


def _load(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> ModelWeights:
    required = required_tensors(spec)
    _check(checkpoint, required)
    read = 0

    def take(shape: tuple[int, ...], parts: tuple[str, ...]) -> Tensor:
        nonlocal read
        weight = torch.empty(shape, dtype=dtype, device=device)
        for target, part in zip(weight.view(len(parts), -1), parts, strict=True):
            target.copy_(checkpoint.load(part, dtype).flatten())
            read += 1
            if progress is not None:
                progress(read, len(required))
        return weight

    return assemble_weights(spec, take)


def _check(checkpoint: Checkpoint, required: dict[str, tuple[int, ...]]) -> None:
    stored = checkpoint.names()
    missing = required.keys() - stored
    extra = {name for name in stored - required.keys() if not IGNORED_TENSORS.search(name)}
    faults = [f"lacks {_few(missing)}"] * bool(missing) + [f"has {_few(extra)} too many"] * bool(extra)
    if faults:
        raise CheckpointError(f"{checkpoint.path} does not fit its configuration: it {' and '.join(faults)}")
    for name, shape in required.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, "
                f"but the configuration asks for {list(shape)}"
            )


def _few(names: Iterable[str]) -> str:
    """A count and up to three of the names."""
    ordered = sorted(names)
    listed = ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")
    return f"{len(ordered)} tensor{'s' * (len(ordered) > 1)} ({listed})"


def _part_shape(shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """Shape of one of `num_parts` tensors that, one below the other, make up a weight of this shape."""
    if num_parts == 1:
        return shape
    if len(shape) == 1:
        return (shape[0] // num_parts,)
    return (prod(shape[:-1]) // num_parts, shape[-1])
