from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.kernels.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    YarnScaling,
    rope_bytes,
    rope_flops,
    rope_frequencies,
    rope_reference,
    rope_table,
    yarn_amplitude,
)

CPU = torch.device("cpu")


def rotate(x, positions, spec, num_positions=4096):
    """`x` [tokens, heads, head_dim] rotated by the reference, as queries and as keys."""
    q, k = rope_reference(x, x, *rope_table(spec, num_positions, CPU).at(positions))
    assert torch.equal(q, k)
    return q


def test_equals_complex_multiplication():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 1000, 4095])
    spec = RopeSpec(head_dim=16, theta=10_000.0)
    angle = positions.double()[:, None] * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x.float(), positions, spec).double(), expected, atol=1e-6, rtol=0)


def test_position_zero_changes_nothing():
    x = torch.randn(2, 1, 8)
    assert torch.equal(rotate(x, torch.zeros(2, dtype=torch.int64), RopeSpec(8, 10_000.0)), x)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_scores_depend_on_distance_only(first, distance, shift):
    generator = torch.Generator().manual_seed(first)
    q, k = torch.randn(2, 1, 1, 32, generator=generator)
    spec = RopeSpec(head_dim=32, theta=500_000.0)

    def score(query_position, key_position):
        turned_q = rotate(q, torch.tensor([query_position]), spec)
        turned_k = rotate(k, torch.tensor([key_position]), spec)
        return (turned_q * turned_k).sum().item()

    near, far = score(first + distance, first), score(first + distance + min(shift, 95), first + min(shift, 95))
    assert near == pytest.approx(far, abs=2e-5)


def test_angles_stay_exact_at_large_positions():
    table = rope_table(RopeSpec(head_dim=128, theta=1_000_000.0), 131_072, CPU)
    position, channel = 131_071, 5
    angle = position * 1_000_000.0 ** (-channel / 64)
    assert table.cos[position, channel].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert table.sin[position, channel].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_bfloat16_is_rounded_once():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 2, 64, generator=generator).bfloat16()
    positions = torch.tensor([3, 77, 500, 4000])
    spec = RopeSpec(head_dim=64, theta=10_000.0)
    assert torch.equal(rotate(x, positions, spec), rotate(x.float(), positions, spec).bfloat16())


def test_float64_is_rotated_in_float64():
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cos, sin = rope_table(RopeSpec(head_dim=64, theta=10_000.0), 100, CPU).at(torch.tensor([3, 7, 50, 99]))
    rotated, _ = rope_reference(x, x, cos, sin)
    pairs = torch.complex(x[..., :32], x[..., 32:]) * torch.complex(cos.double(), sin.double())[:, None]
    torch.testing.assert_close(rotated, torch.cat([pairs.real, pairs.imag], dim=-1), atol=1e-15, rtol=1e-15)


def test_linear_scaling_stretches_positions():
    plain, stretched = RopeSpec(16, 10_000.0), RopeSpec(16, 10_000.0, LinearScaling(factor=4.0))
    torch.testing.assert_close(
        rope_table(stretched, 400, CPU).cos[::4], rope_table(plain, 100, CPU).cos, atol=1e-7, rtol=0
    )


def test_llama3_keeps_fast_channels_divides_slow_ones_and_blends_between():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    plain = rope_frequencies(RopeSpec(128, 500_000.0))
    scaled = rope_frequencies(RopeSpec(128, 500_000.0, scaling))
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns >= 4, turns <= 1
    between = ~fast & ~slow
    assert fast.any()
    assert slow.any()
    assert between.any()
    torch.testing.assert_close(scaled[fast], plain[fast], rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled[slow], plain[slow] / 8, rtol=1e-12, atol=0)
    assert ((scaled > plain / 8) & (scaled < plain))[between].all()
    assert (scaled.diff() < 0).all()


def test_yarn_keeps_the_first_channels_divides_the_last_and_raises_the_amplitude():
    scaling = YarnScaling(factor=4.0, original_positions=32_768, amplitude=yarn_amplitude(4.0))
    spec = RopeSpec(128, 1_000_000.0, scaling)
    plain, scaled = rope_frequencies(RopeSpec(128, 1_000_000.0)), rope_frequencies(spec)
    torch.testing.assert_close(scaled[:20], plain[:20], rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled[-20:], plain[-20:] / 4, rtol=1e-12, atol=0)
    assert (scaled.diff() < 0).all()
    assert rope_table(spec, 1, CPU).cos[0].tolist() == pytest.approx([0.1 * math.log(4) + 1] * 64)


def test_yarn_without_stretching_has_no_amplitude():
    assert yarn_amplitude(1.0) == 1.0


def test_costs():
    q, k = torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 2, 64, dtype=torch.bfloat16)
    cos, sin = rope_table(RopeSpec(64, 10_000.0), 5, CPU).at(torch.arange(5))
    results = rope_reference(q, k, cos, sin)
    moved = sum(tensor.nbytes for tensor in (q, k, cos, sin, *results))
    assert rope_bytes(5, 8, 2, 64, itemsize=2) == moved
    # Each rotated pair takes four products, a difference and a sum.
    assert rope_flops(5, 8, 2, 64) == 5 * (8 + 2) * 32 * 6
