"""What is measured: batches, heads and contexts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from subten.errors import ParameterError

_KILO = 1024


@dataclass(frozen=True)
class Shape:
    """Decode attention of a batch of sequences, one new token each.

    Attributes:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of one KV head.
        head_dim: channels of a head.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int = 128

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From `BATCHxKV_HEADSxGROUP`, with `xHEAD_DIM` where that is not 128.

        Raises:
            ParameterError: it is anything else, or head_dim is no multiple of 16.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
        if match is None:
            raise ParameterError(f"'{text}' is no shape; give BATCHxKV_HEADSxGROUP or BATCHxKV_HEADSxGROUPxHEAD_DIM")
        shape = cls(*(int(number) for number in match.groups() if number is not None))
        if shape.head_dim % 16:
            raise ParameterError(f"head_dim is {shape.head_dim} in '{text}'; it must be a multiple of 16")
        return shape

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def __str__(self) -> str:
        heads = f"{self.batch}x{self.kv_heads}x{self.group}"
        return heads if self.head_dim == 128 else f"{heads}x{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """A shape at one context: tokens that every query reads, its own included."""

    shape: Shape
    context: int


SHAPES = (Shape(1, 8, 4), Shape(8, 8, 4), Shape(32, 8, 4), Shape(8, 4, 8))
CONTEXTS = tuple(k * _KILO for k in (1, 2, 4, 8, 16, 32, 128))
MAIN_CONTEXT = 32 * _KILO
"""Where formats beside the main one are measured as well."""
QUICK = (*(Case(shape, MAIN_CONTEXT) for shape in SHAPES), Case(SHAPES[0], 128 * _KILO))


def parse_context(text: str) -> int:
    """Tokens from `4096` or `4k`.

    Raises:
        ParameterError: it is neither.
    """
    match = re.fullmatch(r"([1-9]\d*)(k?)", text.strip())
    if match is None:
        raise ParameterError(f"'{text}' is no context; give tokens such as 4096 or 4k")
    return int(match[1]) * (_KILO if match[2] else 1)


def context_name(tokens: int) -> str:
    """Inverse of `parse_context`, as short as can be."""
    return f"{tokens // _KILO}k" if tokens and tokens % _KILO == 0 else str(tokens)


def choose(shapes: Sequence[Shape], contexts: Sequence[int], *, quick: bool) -> tuple[Case, ...]:
    """Every shape at every context, or of the few quick cases those that were asked for; empty means all.

    The largest caches come last, where what may go wrong with them spoils the least.

    Raises:
        ParameterError: there is none.
    """
    if quick:
        cases = tuple(
            case
            for case in QUICK
            if (not shapes or case.shape in shapes) and (not contexts or case.context in contexts)
        )
    else:
        cases = tuple(Case(shape, context) for context in contexts or CONTEXTS for shape in shapes or SHAPES)
    if not cases:
        raise ParameterError("--quick has none of these rows and contexts; leave it out, or ask for others")
    return cases
