"""Attention kernels at full size against the torch reference on the same bytes: `make test-gpu`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from subten.kernels.attention.gluon_decode import DECODE as GLUON
from subten.kernels.attention.gluon_prefill import attend_prefill as gluon_prefill
from subten.kernels.attention.inputs import QKNorm
from subten.kernels.attention.paged import norm_and_rotate
from subten.kernels.attention.triton_decode import DECODE as TRITON
from subten.kernels.attention.triton_heads import norm_and_rotate_rows
from subten.kernels.attention.triton_prefill import attend_prefill
from subten.kernels.rope import RopeSpec, rope_table
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


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(128, 32, 4), (64, 15, 5), (80, 3, 1), (256, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_chunks(head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shape = (333, heads + 2 * kv_heads, head_dim)
    together = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    q, k, _ = together.split([heads, kv_heads, kv_heads], dim=1)
    weights = torch.rand(2, head_dim, generator=generator, device="cuda").to(dtype)
    norm, device = QKNorm(weights[0], weights[1], 1e-6), torch.device("cuda", 0)
    rope = rope_table(RopeSpec(head_dim, theta=1e6), 131_072, device)
    positions = torch.arange(130_000, 130_333, device=device)
    found, expected = (way(q, k, positions, norm, rope) for way in (norm_and_rotate_rows, norm_and_rotate))
    step = 2.0 ** (-6 if dtype is torch.bfloat16 else -9)
    for x, reference in zip(found, expected, strict=True):
        assert float((x.double() - reference.double()).abs().max()) <= step * float(reference.abs().max())
        assert float((x == reference).double().mean()) > 0.97
    alone = norm_and_rotate_rows(q[5:6], k[5:6], positions[5:6], norm, rope)
    assert all(torch.equal(one, all_[5:6]) for one, all_ in zip(alone, found, strict=True))


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


@pytest.mark.parametrize("rule", ["window", "chunk"])
@pytest.mark.parametrize(
    ("name", "head_dim", "group"), [("kv2", 128, 4), ("kv2", 128, 8), ("kv2", 64, 3), ("kv2-plain", 128, 5)]
)
@pytest.mark.parametrize("new", [(300, 1, 257, 64), (10, 1, 16, 2)])
@pytest.mark.parametrize("mean_key", [True, False])
def test_gluon_prefill(name: str, head_dim: int, group: int, rule, new: tuple[int, ...], mean_key: bool) -> None:
    lengths, seed = (0, 100, 700, 2000), head_dim + group
    cache = GpuCache.of(name, head_dim, 2, group, lengths, room=400, rule=rule, seed=seed, mean_key=mean_key)
    found, expected = cache.prefill(new, rule, gluon_prefill)
    assert worst_error(found, expected) <= 5e-3
    assert overall_error(found, expected) <= ALLOWED


@pytest.mark.parametrize("rule", ["window", "chunk"])
@pytest.mark.parametrize("sliding_window", [150, 1000])
def test_gluon_prefill_in_a_sliding_window(rule, sliding_window: int) -> None:
    cache = GpuCache.of("kv2", 128, 2, 4, (0, 100, 700, 2000), room=400, rule=rule, mean_key=False)
    kernels = (partial(kernel, sliding_window=sliding_window) for kernel in (gluon_prefill, attend_prefill))
    (found, _), (expected, _) = (cache.prefill((300, 1, 257, 64), rule, kernel) for kernel in kernels)
    assert overall_error(found, expected) <= ALLOWED
