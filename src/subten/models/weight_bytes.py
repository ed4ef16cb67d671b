"""What weights weigh, as they are held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from subten.kernels.moe.inputs import MoEWeights
from subten.models.weight_tree import ModelWeights


def bytes_held(weights: ModelWeights) -> int:
    """Of all weights."""
    return _bytes_of(weights)


def bytes_read(weights: ModelWeights, visited: Sequence[float]) -> int:
    """Of what a decode step reads, whatever its tokens are: every linear layer, norm and router, and of the experts
    those that are visited. Rows of the embedding come on top.

    Args:
        weights: of the model.
        visited: different experts in each layer that has some.
    """
    counts = iter(visited)
    total = _bytes_of((weights.output, weights.final_norm))
    for layer in weights.layers:
        total += _bytes_of(layer)
        if isinstance(layer.feed_forward, MoEWeights):
            experts = _bytes_of(layer.feed_forward.experts)
            total += round(experts * (next(counts) / layer.feed_forward.rule.num_experts - 1))
    return total


def _bytes_of(tree: Any) -> int:
    """Each once, as tied weights are."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(tree)}.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        yield from itertools.chain.from_iterable(map(_tensors, tree))
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name))
