"""What calibration measures of one layer, and which uses of it help: decided by the error of the attention's
outputs on tokens that were not used to measure.

Why held-out outputs and not the error of keys: softmax ignores an error that all keys share. On a model whose keys
have a large common part, rounding to nearest makes nearly the same error everywhere, and feedback turns it into a
different one per token: the weighted error of keys falls while the outputs are destroyed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from subten.formats import FORMATS, CacheGeometry, PageLayout
from subten.formats.codec import through_records
from subten.formats.coding import LayerMoments, calibrated_coding, pair_energy
from subten.kernels.attention.inputs import MeanKey
from subten.kernels.rope import RopeTable, rope_reference

DECIDED_ON = replace(FORMATS["kv2"], value=FORMATS["bf16"].value)
"""The format whose error decides: the coarsest keys that use calibration, and values as they are."""

HELD_OUT = 1 / 3
"""Share of the tokens, the last ones, that only decide."""

MEAN_MUST_GAIN = 0.05
"""Share of the output error by which removing the mean key must lower it: it costs the attention time."""

MEAN_PAIRS = 32
"""Rotary pairs of a head in which its mean key may be other than zero: all at head_dim 64. Some hold nearly all of
what it adds to scores, and on a GPU each costs the attention kernel time at every token."""

_SKIPPED = 1 / 16
"""Share of the tokens, the first ones, that are left out of moments: attention sinks are not like other keys, and
they are never coded."""

_AVERAGED_POSITIONS = 32768
"""Positions over which moments are averaged, or as many as the model has."""


@dataclass(frozen=True)
class MeasuredLayer:
    """One layer of a `Calibration`; the same fields without the axis of layers."""

    query_moment: Tensor
    key_moment: Tensor
    pair_energy: Tensor
    mean_key: Tensor
    shape_keys: Tensor
    whiten_keys: Tensor


def output_moment(weight: Tensor, geometry: CacheGeometry) -> Tensor:
    """W_o^T W_o over the columns of each KV head's group, float32 [num_kv_heads, head_dim, head_dim].

    Args:
        weight: of the output projection, [hidden, num_heads * head_dim].
        geometry: of the model.
    """
    columns = weight.float().unflatten(1, (geometry.num_kv_heads, -1, geometry.head_dim))
    return torch.einsum("ogrd,ogre->gde", columns, columns)


def measure_layer(q: Tensor, k: Tensor, v: Tensor, output: Tensor, rope: RopeTable, scale: float) -> MeasuredLayer:
    """Measure one layer and decide how its keys are coded.

    Args:
        q: [tokens, num_heads, head_dim], after q/k norm and RoPE, at positions 0, 1, ...
        k: [tokens, num_kv_heads, head_dim].
        v: the same shape.
        output: see `output_moment`.
        rope: the model's rotation.
        scale: factor of q . k.
    """
    q, k, v = q.float(), k.float(), v.float()
    fit = round(len(q) * (1 - HELD_OUT))
    held_out = _HeldOut(q, k, v, fit, output, rope, scale)
    candidates = {mean: moments_of(q[:fit], k[:fit], output, rope, remove_mean=mean) for mean in (False, True)}
    errors = {
        choice: held_out.error(*candidates[choice[0]], whiten=choice[1], shape=choice[2])
        for choice in product((False, True), repeat=3)
    }
    best = {mean: torch.stack([errors[c] for c in errors if c[0] == mean]).amin(0).sum() for mean in (False, True)}
    remove_mean = bool(best[True] < best[False] * (1 - MEAN_MUST_GAIN))
    choices = [choice for choice in errors if choice[0] == remove_mean]
    chosen = torch.stack([errors[choice] for choice in choices]).argmin(0)
    whiten, shape = (torch.tensor([c[i] for c in choices], device=k.device)[chosen] for i in (1, 2))
    moments, mean_key = moments_of(q, k, output, rope, remove_mean=remove_mean)
    return MeasuredLayer(moments.query.half(), moments.key.half(), moments.pair_energy, mean_key, shape, whiten)


@dataclass(frozen=True)
class _HeldOut:
    """The tokens from `start` on as a text of their own, and what their attention gives in 16 bit."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: int
    output: Tensor
    rope: RopeTable
    scale: float

    def error(self, moments: LayerMoments, mean_key: Tensor, *, whiten: bool, shape: bool) -> Tensor:
        """Squared error of the outputs after the output projection, per KV head, if keys are coded so."""
        decided = replace(
            moments,
            whiten_keys=torch.full_like(moments.whiten_keys, whiten),
            shape_keys=torch.full_like(moments.shape_keys, shape),
        )
        coding, layout = calibrated_coding(DECIDED_ON, decided), PageLayout(DECIDED_ON, self.k.shape[-1])
        keys, values = self.k[self.start :], self.v[self.start :]
        positions = torch.arange(self.start, len(self.k), device=keys.device)
        mean = MeanKey(mean_key, self.rope).at(positions)
        read, _ = through_records(keys - mean, values, coding, layout)
        difference = self._attend(read + mean) - self._exact
        return torch.einsum("gnd,gde,gne->g", difference, self.output, difference)

    @cached_property
    def _exact(self) -> Tensor:
        return self._attend(self.k[self.start :])

    def _attend(self, keys: Tensor) -> Tensor:
        """Causal attention, [num_kv_heads, group * tokens, head_dim]."""
        q, values = self.q[self.start :], self.v[self.start :]
        tokens, num_kv_heads, head_dim = keys.shape
        rows = q.view(tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3) * self.scale
        scores = rows @ keys.permute(1, 2, 0)[:, None]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        return (weights @ values.transpose(0, 1)[:, None]).flatten(1, 2)


def moments_of(
    q: Tensor, k: Tensor, output: Tensor, rope: RopeTable, *, remove_mean: bool
) -> tuple[LayerMoments, Tensor]:
    """Moments of a text's queries and keys, and the mean key (zeros where it is not removed)."""
    tokens, num_kv_heads, head_dim = k.shape
    positions = torch.arange(tokens, device=k.device)
    cos, sin = rope.at(positions)
    amplitude = cos[:1].square() + sin[:1].square()
    unrotated_q, unrotated_k = rope_reference(q, k, cos / amplitude, -sin / amplitude)
    first = round(tokens * _SKIPPED)
    queries = unrotated_q[first:].view(tokens - first, num_kv_heads, -1, head_dim).permute(1, 0, 2, 3).flatten(1, 2)
    keys = unrotated_k[first:].transpose(0, 1)
    mean = _in_few_pairs(keys.mean(1), queries) if remove_mean else torch.zeros_like(keys[:, 0])
    yes = torch.ones(num_kv_heads, dtype=torch.bool, device=k.device)
    query_moment, key_moment = (
        _averaged_over_positions(x.transpose(1, 2) @ x / x.shape[1], rope) for x in (queries, keys - mean[:, None])
    )
    energy = pair_energy(keys.transpose(1, 2) @ keys / keys.shape[1])
    return LayerMoments(query_moment, key_moment, energy, output, yes, yes), mean


def _in_few_pairs(mean: Tensor, queries: Tensor) -> Tensor:
    """A mean key [heads, head_dim], zero but for the `MEAN_PAIRS` rotary pairs that add most to the scores of
    `queries` [heads, n, head_dim]."""
    energy = mean.square().unflatten(-1, (2, -1)).sum(1) * queries.square().mean(1).unflatten(-1, (2, -1)).sum(1)
    chosen = energy.topk(min(MEAN_PAIRS, energy.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(energy).scatter(-1, chosen, 1.0)
    return mean * kept.repeat(1, 2)


def _averaged_over_positions(moment: Tensor, rope: RopeTable) -> Tensor:
    """The moment [heads, n, n] of vectors that are rotated to positions spread over the whole context, with a mean
    diagonal of 1: a short text must not tie the metric to the angles of its own few positions."""
    cos, sin = (table[:_AVERAGED_POSITIONS].double() for table in (rope.cos, rope.sin))
    count = len(cos)
    cc, cs, ss = cos.T @ cos / count, cos.T @ sin / count, sin.T @ sin / count
    (a, b), (c, d) = (rows.chunk(2, dim=-1) for rows in moment.double().chunk(2, dim=-2))
    upper_left = a * cc - b * cs - c * cs.T + d * ss
    upper_right = b * cc + a * cs - d * cs.T - c * ss
    lower_right = d * cc + c * cs + b * cs.T + a * ss
    averaged = torch.cat(
        [torch.cat([upper_left, upper_right], -1), torch.cat([upper_right.transpose(1, 2), lower_right], -1)], -2
    )
    mean = averaged.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return (averaged / mean.clamp_min(1e-30)).float()
