"""What the implementations of decode attention have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class DecodeKernel:
    """One implementation of decode attention.

    Attributes:
        attend: ``attend(query, layer, inputs, scale, plan, scratch)``, see `triton_decode.attend_decode`.
        prepare: ``prepare(query, layer, max_pages)``, plan and scratch for all steps of these shapes whose sequences
            have so many pages at most.
        integer_query: whether it takes the coded query as integers.
    """

    attend: Callable[..., Tensor]
    prepare: Callable[..., tuple[Any, Any]]
    integer_query: bool = False
