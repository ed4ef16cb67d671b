"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and its stretching over longer contexts.

Convention: channel i is rotated together with channel i + head_dim/2 ("rotate half", as checkpoints in the
Hugging Face layout expect), by `frequency[i]` radians per position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from subten.kernels.precision import at_least_float32


class RopeScaling(Protocol):
    """A change of the frequencies that makes room for more positions than the model was first trained on."""

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin, and so, squared, on every attention score."""

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """The changed frequencies; `frequencies` is float64 [head_dim/2], highest first."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595): all frequencies divided by `factor`."""

    factor: float
    amplitude: ClassVar[float] = 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        """See `RopeScaling.scale`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a linear blend in between.

    Low and high are counted in full turns over `original_positions`: at most `low_freq_factor`, at least
    `high_freq_factor`. Source: `apply_scaling`, models/llama3/model.py in github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    amplitude: ClassVar[float] = 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        """See `RopeScaling.scale`."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, kept.clamp(0, 1))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): a blend by channel index, and a sharper attention.

    The channels that make more than `beta_fast` turns over `original_positions` keep their frequency, those
    that make fewer than `beta_slow` are divided by `factor`. `truncate` rounds the ends of the blend outwards
    to whole channels, as the authors' code does.
    """

    factor: float
    original_positions: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """See `RopeScaling.scale`."""
        num_frequencies = frequencies.numel()
        first = self._channel_of(self.beta_fast, theta, num_frequencies)
        last = self._channel_of(self.beta_slow, theta, num_frequencies)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper clamp is head_dim - 1, although there are head_dim/2 channels: so do the authors and every
        # model trained with it.
        first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
        channel = torch.arange(num_frequencies, dtype=frequencies.dtype, device=frequencies.device)
        divided = ((channel - first) / max(last - first, 0.001)).clamp(0, 1)
        return torch.lerp(frequencies, frequencies / self.factor, divided)

    def _channel_of(self, turns: float, theta: float, num_frequencies: int) -> float:
        """The (fractional) channel that makes `turns` full turns over the original positions."""
        return num_frequencies * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """The paper's fit of the best attention temperature: ``0.1 ln(factor) + 1``, with a model's own slope."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of a model, as data."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position and frequency, float32 [num_positions, head_dim/2]."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, head_dim/2] of int64 `positions` [tokens]."""
        return self.cos[positions], self.sin[positions]


def rope_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position, float64 [head_dim/2], highest first."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    frequencies = spec.theta**-exponents
    return frequencies if spec.scaling is None else spec.scaling.scale(frequencies, spec.theta)


def rope_table(spec: RopeSpec, num_positions: int, device: torch.device) -> RopeTable:
    """Tabulate the rotation of positions 0 .. num_positions - 1.

    Angles are float64: a float32 product of position and frequency is off by up to 0.004 radians at position
    100 000.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), rope_frequencies(spec))
    amplitude = 1.0 if spec.scaling is None else spec.scaling.amplitude
    return RopeTable(
        cos=(angles.cos() * amplitude).to(device=device, dtype=torch.float32),
        sin=(angles.sin() * amplitude).to(device=device, dtype=torch.float32),
    )


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `q` [tokens, num_heads, head_dim] and `k` [tokens, num_kv_heads, head_dim].

    `cos` and `sin` are float32 [tokens, head_dim/2]. Computed in float32 at least, and rounded once to the
    input's dtype.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_flops(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Two products and a sum per element of q and k."""
    return 3 * num_tokens * (num_heads + num_kv_heads) * head_dim


def rope_bytes(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """q and k in and out at `itemsize` bytes per element, a float32 cos and sin per token and frequency."""
    rotated = 2 * num_tokens * (num_heads + num_kv_heads) * head_dim * itemsize
    return rotated + num_tokens * head_dim * 4
