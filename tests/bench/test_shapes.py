from __future__ import annotations

import re

import pytest

from subten.bench.shapes import CONTEXTS, SHAPES, Case, Shape, choose, context_name, parse_context
from subten.errors import ParameterError


@pytest.mark.parametrize("text", ["1x8x4", "32x8x4", "8x4x8x64", "1x1x1x256"])
def test_a_shape_reads_as_it_is_written(text: str) -> None:
    assert str(Shape.parse(text)) == text


def test_parts_of_a_shape() -> None:
    shape = Shape.parse(" 32x8x4x96 ")
    assert shape == Shape(batch=32, kv_heads=8, group=4, head_dim=96)
    assert shape.num_heads == 32
    assert Shape.parse("2x3x4").head_dim == 128


@pytest.mark.parametrize("text", ["", "1x8", "0x8x4", "1x8x4x100", "1x8x4x64x2", "axbxc", "1x-8x4"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"'{text}' is no shape") + "|head_dim is 100"):
        Shape.parse(text)


@pytest.mark.parametrize(("text", "tokens"), [("1k", 1024), ("128k", 131072), ("1000", 1000), (" 2k", 2048)])
def test_contexts(text: str, tokens: int) -> None:
    assert parse_context(text) == tokens
    assert context_name(tokens) == text.strip()


@pytest.mark.parametrize("text", ["", "k", "0", "1.5k", "-1", "1m"])
def test_what_is_no_context_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="is no context"):
        parse_context(text)


def test_all_shapes_at_all_contexts_unless_asked_otherwise() -> None:
    assert len(choose([], [], quick=False)) == len(SHAPES) * len(CONTEXTS) == 28
    assert choose([Shape(2, 2, 2)], [512], quick=False) == (Case(Shape(2, 2, 2), 512),)


def test_quick_is_five_cases_or_some_of_them() -> None:
    assert [(str(c.shape), c.context) for c in choose([], [], quick=True)] == [
        *((name, 32768) for name in ("1x8x4", "8x8x4", "32x8x4", "8x4x8")),
        ("1x8x4", 131072),
    ]
    assert choose([Shape(1, 8, 4)], [131072], quick=True) == (Case(Shape(1, 8, 4), 131072),)
    with pytest.raises(ParameterError, match="--quick has none"):
        choose([Shape(1, 8, 4)], [1024], quick=True)
