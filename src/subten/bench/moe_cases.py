"""What is measured of mixtures of experts: blocks of public models with random weights, and one with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from subten.bench.model_shapes import SHAPES
from subten.bench.terminal import token_counts
from subten.bench.timing import copies_past
from subten.errors import ParameterError
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.moe import MoEWeights, RouterSpec, SharedExpertWeights
from subten.kernels.moe.packing import E4M3
from subten.kernels.moe.router import route
from subten.models.spec import DecoderSpec, MoESpec

WEIGHTS = ("bf16", "channel", "block")
"""16 bit, or FP8 with scales by output channel or by blocks of 128 x 128."""
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 8192
"""Of a prompt."""
DEMO = "demo-moe"


@dataclass(frozen=True)
class MoEModel:
    """The geometry of one block."""

    rule: RouterSpec
    hidden: int
    intermediate: int
    shared: int = 0


def _geometry(spec: DecoderSpec) -> MoEModel:
    block = spec.feed_forwards[0]
    assert isinstance(block, MoESpec)
    return MoEModel(block.router, spec.hidden_size, block.intermediate_size, block.shared_intermediate_size or 0)


MODELS = {name: _geometry(spec) for name, spec in SHAPES.items() if isinstance(spec.feed_forwards[0], MoESpec)}
"""The first block of each shape."""
NAMES = (*MODELS, DEMO)


@dataclass(frozen=True)
class MoECase:
    """One row's problem."""

    shape: str
    tokens: int
    weights: str

    @property
    def is_prompt(self) -> bool:
        """Whether it takes more than one launch."""
        return self.tokens > MOST_TOKENS_OF_A_LAUNCH

    @property
    def launch_tokens(self) -> int:
        """Of one launch."""
        return min(self.tokens, MOST_TOKENS_OF_A_LAUNCH)


@dataclass(frozen=True)
class MoEProblem:
    """A case on a device.

    Attributes:
        layers: that are read in turn, larger together than the L2.
        x: tokens of each layer, bf16 [tokens, hidden].
        logits: of each layer's router (and shared gate), float32 [tokens, experts].
    """

    layers: Sequence[MoEWeights]
    x: Sequence[Tensor]
    logits: Sequence[Tensor]

    @property
    def distinct_experts(self) -> float:
        """Mean over the layers of how many different experts are visited."""
        counts = [
            len(route(logits[:, : w.rule.num_experts], w.rule)[0].unique())
            for w, logits in zip(self.layers, self.logits, strict=True)
        ]
        return sum(counts) / len(counts)

    @property
    def nbytes(self) -> int:
        """That one layer must read and write at least: visited experts, the shared one, tokens in and out. Router and
        shared gate are not in the call, and scales not counted."""
        weights = self.layers[0]
        experts, itemsize = weights.experts, weights.gate_up.element_size()
        shared = 0 if weights.shared is None else weights.shared.expert.intermediate_size
        neurons = self.distinct_experts * experts.intermediate_size + shared
        return round(3 * neurons * experts.hidden_size * itemsize) + 2 * self.x[0].nbytes


def choose_cases(
    shapes: Sequence[str], tokens: Sequence[str], weights: Sequence[str], *, most: int = MOST_TOKENS_OF_A_LAUNCH
) -> tuple[MoECase, ...]:
    """Every combination of up to `most` tokens; empty means all shapes, 1 to 64 tokens, FP8 by blocks.

    Raises:
        ParameterError: there is no such shape, number or kind.
    """
    for option, given, known in (("--shapes", shapes, NAMES), ("--weights", weights, WEIGHTS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ParameterError(f"{option} has '{unknown[0]}'; it takes {', '.join(known)}, separated by commas")
    counts = token_counts("--tokens", tokens, most) or TOKENS
    cases = product(shapes or NAMES, weights or ["block"], counts)
    # The demo model is measured as it is served.
    return tuple(dict.fromkeys(MoECase(shape, n, "bf16" if shape == DEMO else kind) for shape, kind, n in cases))


@torch.inference_mode()
def build_problem(case: MoECase, layers: Sequence[MoEWeights], device: torch.device, seed: int = 0) -> MoEProblem:
    """Random tokens over `layers`, with routing of their own in each."""
    generator = torch.Generator(device).manual_seed(seed)

    def gaussian(columns: int) -> Tensor:
        return torch.randn(case.tokens, columns, generator=generator, device=device)

    weights = layers[0]
    columns = weights.rule.num_experts + (weights.shared is not None and weights.shared.gate is not None)
    x = [gaussian(weights.experts.hidden_size).bfloat16() for _ in layers]
    return MoEProblem(layers, x, [gaussian(columns) for _ in layers])


@torch.inference_mode()
def random_layers(shape: str, kind: str, l2_bytes: int, device: torch.device) -> list[MoEWeights]:
    """Copies of one block, as many as the L2 can't hold even if only what one token visits is read."""
    model = MODELS[shape]
    first = random_block(model, kind, device)
    visited = 3 * (model.rule.top_k * model.intermediate + model.shared) * model.hidden
    copies = copies_past(l2_bytes, visited * (2 if kind == "bf16" else 1))
    held = first.gate_up.nbytes + 2 * first.down.nbytes  # Down is there once more, cut, for the Gluon kernel.
    fitting = _memory(device) // 2 // held
    return [first, *(_copy(first, device) for _ in range(max(2, min(copies, fitting)) - 1))]


def random_block(model: MoEModel, kind: str, device: torch.device) -> MoEWeights:
    """Gaussian weights in one of `WEIGHTS`, made expert by expert."""
    block = empty_block(model, kind, device)
    spread = 0.02 if kind == "bf16" else 32.0
    block.router.copy_(torch.randn(block.router.shape, device=device))
    for experts in (block.experts, *([block.shared.expert] if block.shared else [])):
        for weight in (experts.gate_up, experts.down):
            for part in weight:
                part.copy_((torch.randn(part.shape, device=device) * spread).to(part.dtype))
        for scale in (experts.gate_up_scale, experts.down_scale):
            if scale is not None:
                scale.copy_((0.5 + torch.rand(scale.shape, device=device)) * (0.02 / 32))
    return block


def empty_block(model: MoEModel, kind: str, device: torch.device) -> MoEWeights:
    """As `random_block`, but whatever there is in memory."""
    rule, hidden, width, shared = model.rule, model.hidden, model.intermediate, model.shared

    def weight(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16 if kind == "bf16" else E4M3, device=device)

    def scale(rows: int, columns: int, halves: int, *experts: int) -> Tensor | None:
        if kind == "bf16":
            return None
        sizes = (rows,) if kind == "channel" else (halves * -(-rows // halves // 128), -(-columns // 128))
        return torch.empty(*experts, *sizes, device=device)

    of_all = None
    if shared:
        of_all = SharedExpertWeights(
            weight(2 * shared, hidden),
            weight(hidden, shared),
            None,
            scale(2 * shared, hidden, 2),
            scale(hidden, shared, 1),
        )
    return MoEWeights(
        rule,
        torch.empty(rule.num_experts, hidden, dtype=torch.bfloat16, device=device),
        weight(rule.num_experts, 2 * width, hidden),
        weight(rule.num_experts, hidden, width),
        of_all,
        scale(2 * width, hidden, 2, rule.num_experts),
        scale(hidden, width, 1, rule.num_experts),
    )


def geometry_of(shape: str) -> MoEModel:
    """Of one of `NAMES`."""
    if shape != DEMO:
        return MODELS[shape]
    from subten.checkpoints import open_checkpoint, resolve_model
    from subten.models.families import spec_from_config

    return _geometry(spec_from_config(open_checkpoint(resolve_model(DEMO)).config))


@torch.inference_mode()
def demo_problem(tokens: int, l2_bytes: int, device: torch.device) -> MoEProblem:
    """The experts of the shipped model, and `tokens` of a text as they reach them, from places all over it."""
    seen = [(x[torch.linspace(len(x) // 2, len(x) - 1, tokens).long()], weights) for x, weights in _demo_layers()]
    x = [rows.to(device) for rows, _ in seen]
    layers = [_copy(weights, device) for _, weights in seen]
    visited = 3 * layers[0].rule.top_k * layers[0].experts.intermediate_size * layers[0].experts.hidden_size * 2
    rounds = max(1, -(-copies_past(l2_bytes, visited) // len(seen)))
    layers += [_copy(weights, device) for _ in range(rounds - 1) for weights in layers]
    x *= rounds
    logits = [(x.float() @ weights.router.float().T) for x, weights in zip(x, layers, strict=True)]
    return MoEProblem(layers, x, logits)


@lru_cache
def _demo_layers() -> list[tuple[Tensor, MoEWeights]]:
    """What reaches the experts of each layer for a text, and the experts, in the CPU's memory: that takes seconds
    there, and needs no kernel that a GPU would have to compile first."""
    from subten.engine.calibrate import shipped_text, without_cache
    from subten.engine.loading import load_model
    from subten.kernels.moe.reference import moe_reference
    from subten.models.decoder import Decoder

    model = load_model(DEMO, dtype="bfloat16", device="cpu", kernels={"moe": "torch"}, weights="16bit")
    ids = model.tokenizer.encode(shipped_text())[: model.spec.max_positions]
    seen: list[tuple[Tensor, MoEWeights]] = []

    def look(x: Tensor, weights: MoEWeights, **rest: Any) -> Tensor:
        seen.append((x, weights))
        return moe_reference(x, weights, **rest)

    kernels = replace(model.kernels, moe=look)
    Decoder(model.spec, model.decoder.weights, kernels).forward(without_cache(ids, model.device), None)
    return seen


def _copy(x: Any, device: torch.device) -> Any:
    """The same tensors elsewhere in memory."""
    changes = {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else _copy(value, device)
        for name, value in vars(x).items()
        if isinstance(value, Tensor | SharedExpertWeights)
    }
    return replace(x, **changes)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 30
