"""Reading a decoder's weights from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch

from subten.checkpoints.checkpoint import Checkpoint
from subten.errors import CheckpointError
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.moe.inputs import MoEWeights
from subten.models.families import FAMILIES
from subten.models.spec import DecoderSpec, MoESpec
from subten.models.weight_reader import Storage, WeightReader, quantise_rows, stored_experts
from subten.models.weight_tree import ModelWeights, Role, Taken, Wanted, assemble_weights

IGNORED_TENSORS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Stored tensors that are no weights: older checkpoints hold the rotary frequencies, which `RopeSpec` gives."""

KeptWeights = Literal["16bit", "stored", "fp8"]
"""What is kept in e4m3: nothing; the experts, where the checkpoint stores them so; or the experts and all matrices of
linear layers, the output projection among them, which are quantised with a scale per output channel where they are
not stored so. Norms, biases, routers and embeddings never are; a tied output projection becomes a copy."""


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
    kept: KeptWeights = "16bit",
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read the weights that `spec` asks for; every tensor of the checkpoint is used exactly once.

    Beside the weights themselves this takes memory for one tensor of the checkpoint at a time.

    Args:
        checkpoint: where they are.
        spec: which there are.
        dtype: of everything that is not kept in e4m3.
        device: where they go.
        kept: what is kept in e4m3, see `KeptWeights`.
        progress: called as progress(read, total) after each checkpoint tensor.

    Raises:
        CheckpointError: before anything is read, tensors are missing, left over, or of the wrong shape.
    """
    if FAMILIES[spec.family].names.output in checkpoint.names():
        weights = _load(checkpoint, replace(spec, tied_embeddings=False), dtype, device, kept, progress)
        # Some checkpoints of models with tied embeddings store the matrix under both names. Where the two differ, the
        # configuration is wrong about the tie (transformers 5 decides so as well).
        if spec.tied_embeddings and torch.equal(weights.output.weight, weights.embedding):
            weights = replace(weights, output=LinearWeights(weights.embedding))
    else:
        weights = _load(checkpoint, spec, dtype, device, kept, progress)
    if kept != "fp8":
        return weights
    codes, scale = quantise_rows(weights.output.weight)
    return replace(weights, output=LinearWeights(codes, scale=scale))


def pack_experts(weights: ModelWeights, pack: Callable[[MoEWeights], MoEWeights]) -> ModelWeights:
    """All experts as a kernel takes them (`Kernels.pack_experts`), in place: use the result and not the argument."""
    layers = (
        replace(layer, feed_forward=pack(layer.feed_forward)) if isinstance(layer.feed_forward, MoEWeights) else layer
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


def required_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must hold."""
    return {part.name: part.shape for wanted in _wanted(spec) for part in wanted.parts}


def _wanted(spec: DecoderSpec) -> list[Wanted]:
    noted: list[Wanted] = []

    def take(wanted: Wanted) -> Taken:
        noted.append(wanted)
        return Taken(torch.empty(wanted.shape, device="meta"))

    assemble_weights(spec, take)
    return noted


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
    kept: KeptWeights,
    progress: Callable[[int, int], None] | None,
) -> ModelWeights:
    wanted = _wanted(spec)
    required = {part.name: part.shape for weight in wanted for part in weight.parts}
    _check(checkpoint, required)
    storage: dict[Role, Storage] = {"plain": "wide", "linear": "wide", "experts": "wide"}
    if kept != "16bit":
        storage["experts"] = stored_experts(checkpoint, wanted) or ("channel" if kept == "fp8" else "wide")
    if kept == "fp8":
        storage["linear"] = "channel"
    read = 0

    def take(weight: Wanted) -> Taken:
        nonlocal read
        reader = WeightReader(weight, storage[weight.role], dtype, device)
        for part in weight.parts:
            reader.read(part, checkpoint)
            read += 1
            if progress is not None:
                progress(read, len(required))
        return reader.taken()

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
