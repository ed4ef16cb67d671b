"""Byte and operation counts against numbers worked out by hand."""

from __future__ import annotations

import pytest

from subten.formats import PageLayout, get_format
from subten.kernels.attention.cost import attention_bytes, attention_flops


def test_flops() -> None:
    assert attention_flops(batch=2, num_heads=3, head_dim=8, context=5) == 2 * 3 * 5 * (2 * 8 + 2 * 8)


def test_bytes_of_kv2_at_32k() -> None:
    # 32768 tokens: 192 in 16 bit at 512 bytes, 32576 of 72 bytes: 16 + 16 words, two grids, the kept pair.
    cached = 192 * 512 + 32576 * (32 + 32 + 2 + 2 + 4)
    # q, result, coded query in 16 bit, two kept channels in 32 bit; and 509 pages.
    query = 256 + 256 + 256 + 8
    expected = 8 * (cached + 4 * query) + 509 * 4
    assert attention_bytes(PageLayout(get_format("kv2"), 128), 1, 8, 4, 32768) == expected == 19_577_076


def test_the_mean_key_is_read_once_for_all_sequences() -> None:
    layout = PageLayout(get_format("kv2"), 128)
    with_mean, without = (attention_bytes(layout, 3, 8, 4, 1000, mean_key=mean) for mean in (True, False))
    assert with_mean - without == 8 * 128 * 4


def test_bytes_of_a_16_bit_cache_are_its_elements_the_queries_and_the_block_table() -> None:
    layout = PageLayout(get_format("bf16"), 64)
    assert attention_bytes(layout, 2, 4, 2, 100) == 2 * (4 * (100 * 2 * 64 * 2 + 2 * 2 * 64 * 2) + 2 * 4)


def test_padding_between_planes_is_not_counted() -> None:
    layout = PageLayout(get_format("fp8"), 16)
    # 8 + 8 words of codes, two scales; no window, no coded query.
    assert attention_bytes(layout, 1, 1, 1, 64) == 64 * (16 + 16 + 4) + 2 * 16 * 2 + 4


@pytest.mark.parametrize("name", ["kv2", "kv4", "fp8", "bf16", "k4v2"])
def test_bytes_grow_by_a_token_at_a_time(name: str) -> None:
    layout = PageLayout(get_format(name), 128)
    token = sum(plane.nbytes for plane in layout.planes.values()) // 64
    grown = attention_bytes(layout, 5, 2, 1, 641) - attention_bytes(layout, 5, 2, 1, 640)
    page = layout.pages_for(641) - layout.pages_for(640)
    assert grown == 5 * (2 * token + 4 * page)
