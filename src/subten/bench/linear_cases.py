"""What is measured of linear layers: those of public models, or any, with random weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subten.bench.model_shapes import SHAPES
from subten.bench.terminal import token_counts
from subten.bench.timing import copies_past
from subten.errors import ParameterError
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.linear.inputs import E4M3, LinearWeights, NormWeights
from subten.models.spec import DecoderSpec, MoESpec

WEIGHTS = ("bf16", "fp8")
"""16 bit, or FP8 with a scale for each output channel."""
TOKENS = (1, 8, 16, 32)
MODELS = ("mix-32b-a9b", "qwen3-30b-a3b")
_EPS = 1e-6
_SIZE = re.compile(r"(?P<outputs>[1-9]\d*)x(?P<inputs>[1-9]\d*)(?P<extras>(?:\+(?:norm|normed|residual))*)", re.ASCII)


@dataclass(frozen=True)
class Layer:
    """One product with what belongs to it.

    Attributes:
        name: "qkv", "o", "router" or "vocabulary"; of any other, what belongs to it.
        outputs: channels.
        inputs: channels.
        norm: whether tokens are normed before.
        normed: whether they are left for others after that.
        residual: whether the result is added to something.
        wide: whether it is left in float32; otherwise in bf16.
        always_16_bit: whether its weights stay in 16 bit in a model in FP8.
    """

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    normed: bool = False
    residual: bool = False
    wide: bool = False
    always_16_bit: bool = False


@dataclass(frozen=True)
class LinearCase:
    """One row's problem; `weights` is one of `WEIGHTS`."""

    layer: Layer
    tokens: int
    weights: str


@dataclass(frozen=True)
class LinearInputs:
    """What one call is given.

    Attributes:
        x: bf16 [tokens, inputs].
        weights: of the layer.
        out: [tokens, outputs], where the result goes.
        norm: see `linear_reference`.
        normed: likewise.
        residual: likewise.
    """

    x: Tensor
    weights: LinearWeights
    out: Tensor
    norm: NormWeights | None
    normed: Tensor | None
    residual: Tensor | None

    @property
    def nbytes(self) -> int:
        """That must be read and written at least: weights, tokens in and out. Scales and the norm are not counted."""
        rows = [rows for rows in (self.x, self.out, self.normed, self.residual) if rows is not None]
        return self.weights.weight.nbytes + sum(one.nbytes for one in rows)


def layers_of(spec: DecoderSpec) -> tuple[Layer, ...]:
    """The linear layers of a decode step of a model with experts, each kind once."""
    attention, hidden = spec.attention, spec.hidden_size
    (experts,) = {block for block in spec.feed_forwards if isinstance(block, MoESpec)}
    gate = experts.shared_intermediate_size is not None
    projected = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return (
        Layer("qkv", projected, hidden, norm=True),
        Layer("o", hidden, attention.num_heads * attention.head_dim, residual=True),
        Layer(
            "router",
            experts.router.num_experts + gate,
            hidden,
            norm=True,
            normed=True,
            wide=True,
            always_16_bit=True,
        ),
        Layer("vocabulary", spec.vocab_size, hidden, norm=True, wide=True),
    )


def parse_layer(size: str) -> Layer:
    """A layer from OUTPUTSxINPUTS, with `+norm`, `+normed` (which has a norm) and `+residual` behind it.

    Raises:
        ParameterError: it is not of that form.
    """
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ParameterError(
            f"--sizes has '{size}'; it takes OUTPUTSxINPUTS, with +norm, +normed, +residual behind it where they are "
            "wanted, separated by commas"
        )
    extras = found["extras"].split("+")[1:]
    return Layer(
        "+".join(extras) or "plain",
        int(found["outputs"]),
        int(found["inputs"]),
        norm="norm" in extras or "normed" in extras,
        normed="normed" in extras,
        residual="residual" in extras,
    )


def choose_cases(sizes: Sequence[str], tokens: Sequence[str], weights: Sequence[str]) -> tuple[LinearCase, ...]:
    """Every combination; empty means the layers of `MODELS`, the numbers of `TOKENS`, all `WEIGHTS`.

    Raises:
        ParameterError: a list has something else.
    """
    unknown = [name for name in weights if name not in WEIGHTS]
    if unknown:
        raise ParameterError(f"--weights has '{unknown[0]}'; it takes {', '.join(WEIGHTS)}, separated by commas")
    counts = token_counts("--tokens", tokens, MOST_TOKENS_OF_A_LAUNCH)
    layers = [parse_layer(size) for size in sizes] or [layer for name in MODELS for layer in layers_of(SHAPES[name])]
    cases = [
        LinearCase(layer, count, "bf16" if layer.always_16_bit else kind)
        for layer in layers
        for kind in weights or WEIGHTS
        for count in counts or TOKENS
    ]
    return tuple(dict.fromkeys(cases))


def empty_weights(layer: Layer, kind: str, device: torch.device) -> LinearWeights:
    """Whatever there is in memory."""
    size = layer.outputs, layer.inputs
    if kind == "bf16":
        return LinearWeights(torch.empty(size, dtype=torch.bfloat16, device=device))
    return LinearWeights(torch.empty(size, dtype=E4M3, device=device), scale=torch.ones(layer.outputs, device=device))


@torch.inference_mode()
def random_weights(layer: Layer, kind: str, l2_bytes: int, device: torch.device) -> list[LinearWeights]:
    """Gaussian ones, as many copies as the L2 can't hold."""
    first = empty_weights(layer, kind, device)
    gaussian = torch.randn(first.weight.shape, device=device)
    first.weight.copy_((gaussian * (0.02 if kind == "bf16" else 32.0)).to(first.weight.dtype))
    if first.scale is not None:
        first.scale.copy_((0.5 + torch.rand(first.scale.shape, device=device)) * (0.02 / 32))
    copies = copies_past(l2_bytes, first.weight.nbytes) - 1
    others = (
        LinearWeights(first.weight.clone(), scale=None if first.scale is None else first.scale.clone())
        for _ in range(copies)
    )
    return [first, *others]


@torch.inference_mode()
def build_inputs(
    case: LinearCase, copies: Sequence[LinearWeights], device: torch.device, seed: int = 0
) -> list[LinearInputs]:
    """Random tokens for each of the copies."""
    generator = torch.Generator(device).manual_seed(seed)
    layer = case.layer

    def gaussian(channels: int) -> Tensor:
        return torch.randn(case.tokens, channels, generator=generator, device=device).bfloat16()

    def inputs(weights: LinearWeights) -> LinearInputs:
        x = gaussian(layer.inputs)
        factors = 0.5 + torch.rand(layer.inputs, generator=generator, device=device)
        dtype = torch.float32 if layer.wide else torch.bfloat16
        return LinearInputs(
            x,
            weights,
            torch.empty(case.tokens, layer.outputs, dtype=dtype, device=device),
            NormWeights(factors.bfloat16(), _EPS) if layer.norm else None,
            torch.empty_like(x) if layer.normed else None,
            gaussian(layer.outputs) if layer.residual else None,
        )

    return [inputs(weights) for weights in copies]
