"""Quantising to e4m3 and back, by block and by channel."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.checkpoints import fp8

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
BLOCKS = st.tuples(st.integers(1, 17), st.integers(1, 17))


def random_weight(shape: tuple[int, ...], seed: int, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-4, 2, (*shape[:-1], 1), generator=generator)
    return torch.randn(shape, generator=generator) * spread * 2.0**exponent


def assert_within_e4m3(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Three mantissa bits: half a step is 2^-4 of a normal number, and 2^-10 scales of a subnormal one."""
    bound = torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6)
    assert bool(((values - weight).abs() <= bound).all())


@given(shape=SHAPES, block=BLOCKS, seed=st.integers(0, 99), exponent=st.integers(-60, 60))
def test_blocks(shape: tuple[int, int], block: tuple[int, int], seed: int, exponent: int) -> None:
    weight = random_weight(shape, seed, exponent)
    codes, scale = fp8.quantise_blocks(weight, block)
    assert codes.dtype == fp8.E4M3
    assert tuple(scale.shape) == fp8.block_scale_shape(shape, block)
    spread = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            spread[row, column] = scale[row // block[0], column // block[1]]
    values = fp8.dequantise_blocks(codes, scale, block)
    assert torch.equal(values, codes.float() * spread)
    assert_within_e4m3(values, weight, spread)


@given(shape=SHAPES, seed=st.integers(0, 99), exponent=st.integers(-60, 60))
def test_channels(shape: tuple[int, int], seed: int, exponent: int) -> None:
    weight = random_weight(shape, seed, exponent)
    codes, scale = fp8.quantise_channels(weight)
    assert codes.dtype == fp8.E4M3
    assert scale.shape == (shape[0], 1)
    values = fp8.dequantise_channels(codes, scale)
    assert torch.equal(values, fp8.dequantise_channels(codes, scale.squeeze(-1)))
    assert_within_e4m3(values, weight, scale)


def test_stacked_experts_are_quantised_one_by_one() -> None:
    weight = random_weight((3, 20, 30), 0, 0)
    for quantise in (lambda w: fp8.quantise_blocks(w, (8, 16)), fp8.quantise_channels):
        codes, scale = quantise(weight)
        for expert in range(3):
            alone_codes, alone_scale = quantise(weight[expert])
            assert torch.equal(codes[expert].float(), alone_codes.float())
            assert torch.equal(scale[expert], alone_scale)


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    for weight in (torch.zeros(4, 6), torch.full((4, 6), 1e-45), torch.full((4, 6), 3e38)):
        for codes, scale in (fp8.quantise_blocks(weight), fp8.quantise_channels(weight)):
            assert codes.float().isfinite().all()
            assert bool((scale > 0).all())


def test_the_largest_value_of_a_block_is_exact() -> None:
    weight = random_weight((128, 256), 1, 3)
    codes, scale = fp8.quantise_blocks(weight)
    largest = weight.view(128, 2, 128).abs().amax(dim=(0, 2))
    assert torch.allclose(scale[0] * fp8.E4M3_MAX, largest)
    assert torch.allclose(fp8.dequantise_blocks(codes, scale).view(128, 2, 128).abs().amax(dim=(0, 2)), largest)
