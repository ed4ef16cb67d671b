"""A model of a given geometry with random weights, made on the device: nothing is read or copied.

Weights are Gaussian, scaled so that a projection of numbers around one gives numbers around one: hidden states stay
finite, tokens differ from each other, and routers choose all experts about equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from subten.bench.caches import random_calibration
from subten.bench.shapes import Shape
from subten.checkpoints import open_checkpoint, resolve_model
from subten.engine.calibrate import Calibration
from subten.engine.loading import LoadedModel
from subten.engine.tokenizer import Tokenizer
from subten.formats import KVFormat
from subten.formats.coding import LayerCoding
from subten.kernels.moe import MoEWeights, SharedExpertWeights
from subten.kernels.moe.inputs import SCALE_BLOCK
from subten.kernels.moe.packing import E4M3
from subten.kernels.select import select_kernels
from subten.models.decoder import Decoder
from subten.models.spec import DecoderSpec
from subten.models.weight_tree import LinearWeights, ModelWeights, assemble_weights

ExpertScales = Literal["channel", "block"]
"""What shares a scale: an output channel, or a block of 128 x 128."""

_CODE = 32.0
"""Standard deviation of codes in e4m3: 14 of them fit in below the largest."""
_PART = 1 << 28
"""Numbers that are drawn at a time, at most."""
_DEMO = "demo-moe"

_T = TypeVar("_T")


def random_model(
    name: str, spec: DecoderSpec, scales: ExpertScales, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LoadedModel:
    """A model that can run: linear layers and experts in FP8, embeddings, router, norms and output in `dtype`.

    It has the tokenizer of the shipped model, which knows other words than this one's vocabulary.

    Raises:
        KernelUnavailableError: no kernel serves it here.
    """
    kernels = select_kernels(device, dtype=dtype, experts=spec.expert_sizes)
    demo = open_checkpoint(resolve_model(_DEMO))
    return LoadedModel(
        name=name,
        path=Path(name),
        spec=spec,
        decoder=Decoder(spec, random_weights(spec, scales, dtype, device, seed), kernels),
        tokenizer=Tokenizer.from_checkpoint(demo),
        fingerprint=f"random {name} {scales} {seed}",
        dtype=dtype,
        device=device,
        kernels=kernels,
    )


@torch.inference_mode()
def random_weights(
    spec: DecoderSpec, scales: ExpertScales, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Of every tensor that the spec asks for."""
    draw = _Draw(scales, dtype, device, torch.Generator(device).manual_seed(seed))
    # Its tensors say how large each weight is, and nothing else.
    sizes = assemble_weights(spec, lambda shape, _parts: torch.empty(shape, device="meta"))
    embedding = draw.normal(sizes.embedding.shape, 1.0)
    output = embedding if spec.tied_embeddings else draw.normal(sizes.output.shape, spec.hidden_size**-0.5)
    layers = tuple(draw.tree(layer) for layer in sizes.layers)
    return ModelWeights(embedding, layers, draw.tree(sizes.final_norm), output)


@dataclass(frozen=True)
class _Draw:
    """Draws what a tree of sizes says."""

    scales: ExpertScales
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def tree(self, sizes: _T) -> _T:
        """The same tree with numbers. A tensor that belongs to no linear layer and no expert is a norm's."""
        drawn: Any = sizes
        if isinstance(sizes, LinearWeights):
            drawn = self._linear(sizes)
        elif isinstance(sizes, MoEWeights):
            drawn = self._moe(sizes)
        elif isinstance(sizes, Tensor):
            drawn = torch.ones(sizes.shape, dtype=self.dtype, device=self.device)
        elif is_dataclass(sizes) and not isinstance(sizes, type):
            drawn = replace(sizes, **{field.name: self.tree(getattr(sizes, field.name)) for field in fields(sizes)})
        return drawn

    def normal(self, shape: Sequence[int], deviation: float) -> Tensor:
        """In 16 bit."""
        drawn = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        self._fill(drawn, deviation)
        return drawn

    def _linear(self, sizes: LinearWeights) -> LinearWeights:
        rows, columns = sizes.weight.shape
        bias = None if sizes.bias is None else self.normal((rows,), 0.1)
        return LinearWeights(self._codes(rows, columns), bias, self._scale("channel", rows, columns, 1))

    def _moe(self, sizes: MoEWeights) -> MoEWeights:
        experts, width, hidden = len(sizes.gate_up), sizes.experts.intermediate_size, sizes.experts.hidden_size
        return replace(
            sizes,
            router=self.normal(sizes.router.shape, hidden**-0.5),
            gate_up=self._codes(experts, 2 * width, hidden),
            down=self._codes(experts, hidden, width),
            shared=None if sizes.shared is None else self._shared(sizes.shared),
            gate_up_scale=self._scale(self.scales, 2 * width, hidden, 2, experts),
            down_scale=self._scale(self.scales, hidden, width, 1, experts),
        )

    def _shared(self, sizes: SharedExpertWeights) -> SharedExpertWeights:
        (hidden, width), gate = sizes.down.shape, sizes.gate
        return SharedExpertWeights(
            gate_up=self._codes(2 * width, hidden),
            down=self._codes(hidden, width),
            gate=None if gate is None else self.normal(gate.shape, hidden**-0.5),
            gate_up_scale=self._scale(self.scales, 2 * width, hidden, 2),
            down_scale=self._scale(self.scales, hidden, width, 1),
        )

    def _codes(self, *shape: int) -> Tensor:
        codes = torch.empty(shape, dtype=E4M3, device=self.device)
        self._fill(codes, _CODE)
        return codes

    def _scale(self, kind: ExpertScales, rows: int, columns: int, halves: int, *experts: int) -> Tensor:
        """Gate and up, the `halves` of some weights, have blocks of their own."""
        sizes = (rows,) if kind == "channel" else (halves * -(-rows // halves // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        spread = torch.rand(*experts, *sizes, generator=self.generator, device=self.device)
        return (0.5 + spread) * (columns**-0.5 / _CODE)

    def _fill(self, target: Tensor, deviation: float) -> None:
        flat = target.view(-1)
        for part in flat.split(_PART):
            part.copy_(torch.randn(part.shape, generator=self.generator, device=self.device).mul_(deviation))


@dataclass(frozen=True)
class AlikeCalibration(Calibration):
    """A calibration by which all layers are coded alike: made in a moment, whatever the number of layers."""

    of_every_layer: LayerCoding

    def coding(self, layer: int, fmt: KVFormat, model: LoadedModel) -> LayerCoding:  # noqa: ARG002
        """See `Calibration.coding`."""
        return self.of_every_layer


def random_model_calibration(fmt: KVFormat, model: LoadedModel, *, mean_key: bool) -> AlikeCalibration:
    """As calibration would find it on random moments; all layers remove a mean key where the format may, or none."""
    geometry = model.geometry
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    group = model.spec.attention.num_heads // heads
    found = random_calibration(fmt, Shape(1, heads, group, head_dim), 1, model.device)
    none = torch.zeros(0)
    mean = torch.zeros(geometry.num_layers, heads, head_dim)
    if mean_key and found.mean_key is not None:
        mean += found.mean_key.mean.cpu()
    return AlikeCalibration(none, none, none, mean, none, none, model.fingerprint, "", 0, found.coding)
