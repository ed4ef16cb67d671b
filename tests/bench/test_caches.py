from __future__ import annotations

import math

import pytest
import torch

from subten.bench.caches import NewTokens, build_cache, layer_bytes, random_calibration, reference
from subten.bench.shapes import Shape
from subten.formats import PAGE_SIZE, PageLayout, get_format
from subten.kernels.attention.append import append_reference
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.inputs import LayerCache
from support.kv import CPU

SHAPE = Shape(3, 2, 2, 64)
CONTEXTS = (1, 30, 161)


@pytest.mark.parametrize("name", ["kv2", "kv4", "fp8", "bf16"])
def test_the_oracle_is_that_of_a_step_of_the_torch_references(name: str) -> None:
    """Append and attend as the engine does it on a CPU; contexts are chosen so that its append codes no new token."""
    torch.manual_seed(0)
    layout = PageLayout(get_format(name, sinks=3, recent=10), SHAPE.head_dim)
    calibration = random_calibration(layout.format, SHAPE, 256, CPU)
    cache = build_cache(layout, SHAPE.kv_heads, CONTEXTS, 2, calibration)
    tokens = NewTokens.random(SHAPE, CPU)
    held = LayerCache(
        cache.layers.pages[1], cache.layers.windows[1], calibration.coding, calibration.mean_key, layout
    )
    scale = 1 / math.sqrt(SHAPE.head_dim)
    if layout.format.recent == 0:
        # Without a window the new token is read through codes, which the oracle takes as they are in the pages.
        append_reference(tokens.k, tokens.v, held, cache.inputs)
    mine = torch.stack([reference(cache, 1, tokens, row, scale) for row in range(SHAPE.batch)])
    wide = append_reference(tokens.k, tokens.v, held, cache.inputs)
    expected = attend_reference(tokens.q.float(), wide, held, cache.inputs, scale)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_pages_of_a_cache_are_coded_tokens_and_dealt_out_once() -> None:
    layout = PageLayout(get_format("kv2", sinks=3, recent=10), 64)
    cache = build_cache(layout, 2, [500, 300], 3, random_calibration(layout.format, Shape(2, 2, 1, 64), 600, CPU))
    table = cache.inputs.block_table
    counts = [-(-(500 + 1 - 13) // PAGE_SIZE), -(-(300 + 1 - 13) // PAGE_SIZE)]
    assert table.shape == (2, counts[0])
    used = [int(page) for row, count in enumerate(counts) for page in table[row, :count]]
    assert sorted(used) == list(range(sum(counts)))
    assert cache.layers.pages.shape == (3, sum(counts), 2, layout.record_bytes)
    assert torch.equal(cache.layers.pages[0], cache.layers.pages[2])
    assert not torch.equal(cache.layers.pages[0, 0], cache.layers.pages[0, 1])
    # The same page of all layers is one stretch of memory, as in a served cache.
    assert cache.layers.pages.stride(1) == 3 * 2 * layout.record_bytes


def test_the_mean_key_can_be_left_out() -> None:
    layout = PageLayout(get_format("kv2"), 64)
    calibration = random_calibration(layout.format, SHAPE, 600, CPU)
    cache = build_cache(layout, 2, [400] * 3, 1, calibration)
    assert cache.layers.tables.mean is not None
    without = cache.with_mean_key(None)
    assert without.layers.tables.mean is None
    assert without.layers.pages is cache.layers.pages
    tokens = NewTokens.random(SHAPE, CPU)
    assert not torch.allclose(reference(cache, 0, tokens, 0, 0.1), reference(without, 0, tokens, 0, 0.1))
    plain = PageLayout(get_format("fp8"), 64)
    assert random_calibration(plain.format, SHAPE, 600, CPU).mean_key is None


def test_bytes_of_a_layer() -> None:
    layout = PageLayout(get_format("kv2"), 128)
    pages = math.ceil((1024 - 192) / 64)
    assert layer_bytes(layout, Shape(2, 8, 4), 1024) == 2 * 8 * (pages * 4608 + 192 * 2 * 128 * 2)
