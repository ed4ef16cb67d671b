"""A model of a given geometry with random weights, made on the device: nothing is read or copied.

Weights are Gaussian, scaled so that a projection of numbers around one gives numbers around one: hidden states stay
finite, tokens differ from each other, and routers choose all experts about equally often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.moe.inputs import SCALE_BLOCK
from subten.kernels.moe.packing import E4M3
from subten.kernels.select import select_kernels
from subten.models.decoder import Decoder
from subten.models.families.family import TensorNames
from subten.models.spec import DecoderSpec
from subten.models.weight_reader import quantise_rows
from subten.models.weight_tree import ModelWeights, Taken, Wanted, assemble_weights

ExpertScales = Literal["channel", "block"]
"""What shares a scale: an output channel, or a block of 128 x 128."""

_CODE = 32.0
"""Standard deviation of codes in e4m3: 14 of them fit in below the largest."""
_PART = 1 << 28
"""Numbers that are drawn at a time, at most."""
_BIAS = 0.1
_DEMO = "demo-moe"


def random_model(
    name: str, spec: DecoderSpec, scales: ExpertScales, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LoadedModel:
    """A model that can run: linear layers, experts and output in FP8, as with `weights="fp8"`; the rest in `dtype`.

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
        weights="fp8",
    )


@torch.inference_mode()
def random_weights(
    spec: DecoderSpec, scales: ExpertScales, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Of every weight that the spec asks for."""
    weights = assemble_weights(spec, _Draw(scales, dtype, device, torch.Generator(device).manual_seed(seed)))
    codes, scale = quantise_rows(weights.output.weight)
    return replace(weights, output=LinearWeights(codes, scale=scale))


@dataclass(frozen=True)
class _Draw:
    """Supplies weights, see `Take`."""

    scales: ExpertScales
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def __call__(self, wanted: Wanted) -> Taken:
        """One of them. Of the plain ones vectors are norms or biases, and matrices embed or route."""
        if wanted.role != "plain":
            return self._codes(wanted, self.scales if wanted.role == "experts" else "channel")
        plain = torch.ones(wanted.shape, dtype=self.dtype, device=self.device)
        name = wanted.parts[0].name
        if name.endswith(".bias"):
            self._fill(plain, _BIAS)
        elif plain.ndim > 1:
            self._fill(plain, 1.0 if name == TensorNames().embedding else wanted.shape[-1] ** -0.5)
        return Taken(plain)

    def _codes(self, wanted: Wanted, scales: ExpertScales) -> Taken:
        *experts, rows, columns = wanted.shape
        codes = torch.empty(wanted.shape, dtype=E4M3, device=self.device)
        self._fill(codes, _CODE)
        sizes = [rows]
        if scales == "block":
            sizes = [wanted.halves * -(-rows // wanted.halves // SCALE_BLOCK), -(-columns // SCALE_BLOCK)]
        spread = torch.rand(*experts, *sizes, generator=self.generator, device=self.device)
        return Taken(codes, (0.5 + spread) * (columns**-0.5 / _CODE))

    def _fill(self, target: Tensor, deviation: float) -> None:
        for part in target.view(-1).split(_PART):
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
