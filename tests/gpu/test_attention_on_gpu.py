"""Attention kernels at full size against the torch reference on the same bytes: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from subten.kernels.attention.gluon_decode import DECODE as GLUON
from subten.kernels.attention.triton_decode import DECODE as TRITON
from support.on_gpu import GpuCache, overall_error, worst_error

pytestmark = pytest.mark.gpu

ALLOWED = 2e-3
"""Relative error of a batch."""
ALLOWED_OF_A_SEQUENCE = 3e-3
"""Relative to its own result: with few heads, one in which the weights are steep is all of it."""
EDGES = (0, 1, 63, 64, 65, 191, 255, 256, 257, 300, 319, 320, 321, 383, 384, 385, 1000, 3000)
"""Tokens before the new one; with default windows of 64 and 192 the first page begins at 256."""


def check(cache: GpuCache, kernel, **options) -> None:
    found, again, expected = cache.decode(kernel, **options)
    assert overall_error(found, expected) <= ALLOWED
    assert worst_error(found, expected) <= ALLOWED_OF_A_SEQUENCE
    assert torch.equal(found, again), "the result depends on which program was last"


@pytest.mark.parametrize("mean_key", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "group"), [(128, 4), (128, 1), (128, 7), (128, 8), (128, 12), (64, 3), (64, 8), (256, 2)]
)
def test_gluon_decode(head_dim: int, group: int, mean_key: bool) -> None:
    check(GpuCache.of("kv2", head_dim, 2, group, EDGES, mean_key=mean_key, seed=head_dim + group), GLUON)


def test_gluon_decode_of_many_sequences() -> None:
    lengths = [(37 * row) % 1500 for row in range(200)]
    check(GpuCache.of("kv2-plain", 128, 2, 4, lengths), GLUON)


def test_gluon_decode_of_a_long_sequence() -> None:
    check(GpuCache.of("kv2", 128, 4, 4, [40_000, 3], mean_key=True), GLUON)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gluon_decode_in_16_bit(dtype: torch.dtype) -> None:
    """The result is rounded to 8 or 11 bits of mantissa."""
    found, _, expected = GpuCache.of("kv2", 128, 2, 4, EDGES).decode(GLUON, dtype)
    assert found.dtype == dtype
    assert worst_error(found, expected) <= 4e-3


@pytest.mark.parametrize(
    ("name", "head_dim", "group"),
    [
        ("kv2", 128, 4),
        ("kv2", 80, 2),
        ("kv4", 128, 8),
        ("kv4", 96, 1),
        ("k4v2", 128, 5),
        ("fp8", 128, 4),
        ("fp8", 256, 16),
        ("bf16", 128, 4),
        ("bf16", 64, 7),
    ],
)
def test_triton_decode(name: str, head_dim: int, group: int) -> None:
    check(GpuCache.of(name, head_dim, 2, group, EDGES, seed=head_dim + group), TRITON)


@pytest.mark.parametrize("rule", ["window", "chunk"])
@pytest.mark.parametrize(
    ("name", "head_dim", "group"),
    [
        ("kv2", 128, 4),
        ("kv2", 64, 3),
        ("kv2", 256, 2),
        ("kv4", 96, 2),
        ("k4v2", 128, 8),
        ("fp8", 128, 1),
        ("bf16", 128, 4),
    ],
)
@pytest.mark.parametrize("new", [(300, 1, 257, 64), (10, 1, 16, 2)])
def test_triton_prefill(name: str, head_dim: int, group: int, rule, new: tuple[int, ...]) -> None:
    cache = GpuCache.of(name, head_dim, 2, group, (0, 100, 700, 2000), room=400, rule=rule, seed=head_dim + group)
    found, expected = cache.prefill(new, rule)
    assert worst_error(found, expected) <= 5e-3
    assert overall_error(found, expected) <= ALLOWED
