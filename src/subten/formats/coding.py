"""What the codec must know of a layer beyond its format: which channels to keep, the space to code in, and what
an error costs there. Computed once from the moments that calibration measured; plain tensors afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from subten.formats.hadamard import hadamard
from subten.formats.shaping import NoiseShaper
from subten.formats.spec import KVFormat, TensorFormat

WHITENING = 0.375
"""Power of the keys' covariance that is taken out before coding (1/2 would make them white): noise is then larger
where keys are larger. Measured best of 0.125, 0.25, 0.375 and 0.5 (docs/formats/quality.md)."""

WHITENING_FLOOR = 0.1
"""Added to the covariance, as a share of its mean: keeps the transform's condition number bounded
for moments from a short text."""


@dataclass(frozen=True)
class TensorCoding:
    """How one layer's keys or values are coded.

    Attributes:
        to_coded: float32 [num_kv_heads, head_dim, head_dim]; a vector x is coded as x @ to_coded.
        from_coded: its inverse. A query sees coded keys as q @ from_coded^T.
        shaper: what an error costs in coded space; None rounds every element to its nearest level.
    """

    to_coded: Tensor
    from_coded: Tensor
    shaper: NoiseShaper | None


@dataclass(frozen=True)
class LayerCoding:
    """How one layer is coded.

    Attributes:
        kept_channels: int64 [num_kv_heads, num_kept], key channels c and c + head_dim / 2 of each kept pair.
        key: of the keys; None where they are coded (or kept) in their own space, nearest level.
        value: of the values.
    """

    kept_channels: Tensor
    key: TensorCoding | None
    value: TensorCoding | None

    @cached_property
    def shaper(self) -> NoiseShaper | None:
        """Of the key heads and then the value heads, where both are shaped."""
        if self.key is None or self.key.shaper is None or self.value is None or self.value.shaper is None:
            return None
        return self.key.shaper.and_(self.value.shaper)


@dataclass(frozen=True)
class LayerMoments:
    """Second moments of one layer, [num_kv_heads, head_dim, head_dim], and what was decided on held-out text.

    Attributes:
        query: of the queries of each KV head's group, after RoPE, averaged over positions.
        key: of the keys, their mean taken out where the layer's mean key is removed.
        pair_energy: float32 [num_kv_heads, head_dim / 2], mean squared length of each rotary pair
            (c, c + head_dim / 2) of the keys, their mean included.
        output: W_o^T W_o over the group's columns: what an error of a value costs after the output projection.
        shape_keys: bool [num_kv_heads], whether shaping the keys' rounding lowers the error of the attention.
        whiten_keys: bool [num_kv_heads], the same of whitening.
    """

    query: Tensor
    key: Tensor
    pair_energy: Tensor
    output: Tensor
    shape_keys: Tensor
    whiten_keys: Tensor


def uncalibrated_coding(fmt: KVFormat, head_dim: int, kept_channels: Tensor) -> LayerCoding:
    """Coding by the format alone: Hadamard where it has a transform, every element to its nearest level."""

    def side(tensor: TensorFormat) -> TensorCoding | None:
        if tensor.transform == "none":
            return None
        matrix = _hadamard(head_dim, kept_channels.device).expand(kept_channels.shape[0], -1, -1)
        return TensorCoding(matrix, matrix, None)

    return LayerCoding(kept_channels, side(fmt.key), side(fmt.value))


def calibrated_coding(fmt: KVFormat, moments: LayerMoments) -> LayerCoding:
    """Coding by a format and one layer's moments.

    The pairs with the most energy are kept, and left out of what follows. Keys are whitened in part (where that
    was found good), so that no direction sets the step of all others; then the queries' moment, seen through the
    same transform, weighs the errors of rounding. Values need no whitening: the output projection's moment weighs
    their errors after a plain Hadamard transform.
    """
    half = moments.key.shape[-1] // 2
    energy = pair_energy(moments.key) if fmt.key.remove_mean else moments.pair_energy
    pairs = energy.topk(fmt.key.kept_pairs, dim=-1).indices
    kept = torch.cat([pairs, pairs + half], dim=-1)
    return LayerCoding(kept, _key_coding(fmt.key, moments, kept), _value_coding(fmt.value, moments.output))


def pair_energy(moment: Tensor) -> Tensor:
    """Mean squared length of each rotary pair (c, c + n / 2) of vectors with this moment [heads, n, n]."""
    by_half: Tensor = moment.diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1))
    return by_half.sum(-2)


def _key_coding(fmt: TensorFormat, moments: LayerMoments, kept: Tensor) -> TensorCoding | None:
    if fmt.transform == "none":
        return None
    query, key = (without_channels(x.double(), kept) for x in (moments.query, moments.key))
    rotation = _hadamard(query.shape[-1], query.device).double()
    eye = torch.eye(query.shape[-1], dtype=torch.float64, device=query.device)
    whitening = eye.expand_as(query)
    if fmt.transform == "whitened":
        whitening = torch.where(moments.whiten_keys[:, None, None], whitening_matrix(key), whitening)
    # Symmetric and positive definite; torch's batched LU can't be trusted (shaping.py).
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(whitening))
    to_coded, from_coded = whitening @ rotation, rotation @ inverse
    shaper = None
    if fmt.rounding == "shaped":
        metric = from_coded @ query @ from_coded.transpose(1, 2)
        # A metric that is the same in all directions shapes nothing.
        shaper = NoiseShaper.from_metric(torch.where(moments.shape_keys[:, None, None], metric, eye))
    return TensorCoding(to_coded.float(), from_coded.float(), shaper)


def _value_coding(fmt: TensorFormat, output: Tensor) -> TensorCoding | None:
    if fmt.transform == "none":
        return None
    rotation = _hadamard(output.shape[-1], output.device)
    shaper = None
    if fmt.rounding == "shaped":
        shaper = NoiseShaper.from_metric(rotation.double() @ output.double() @ rotation.double())
    matrix = rotation.expand(output.shape[0], -1, -1)
    return TensorCoding(matrix, matrix, shaper)


def whitening_matrix(moment: Tensor, power: float = WHITENING) -> Tensor:
    """Symmetric [heads, n, n] -power of the moment, whose mean variance is scaled to 1."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    values, vectors = torch.linalg.eigh(moment / mean.clamp_min(1e-300))
    powers = (values.clamp_min(0) + WHITENING_FLOOR) ** -power
    whitening: Tensor = vectors @ (powers[:, :, None] * vectors.transpose(1, 2))
    return whitening


def without_channels(moment: Tensor, channels: Tensor) -> Tensor:
    """A moment of vectors whose `channels` [heads, n] are zero."""
    keep = torch.ones_like(moment[:, 0]).scatter_(-1, channels, 0.0)
    return moment * keep[:, :, None] * keep[:, None]


def _hadamard(head_dim: int, device: torch.device) -> Tensor:
    return hadamard(torch.eye(head_dim, device=device))
