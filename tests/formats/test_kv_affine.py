from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subten.formats import get_format
from subten.formats.affine import load_affine, parts, store_affine, to_f16, unbiasing
from support import quantizers as by_definition
from support.kv import gaussian

PACKED, FP16 = get_format("kv2").value, get_format("kv4").value
either = pytest.mark.parametrize("fmt", [PACKED, FP16], ids=["packed", "fp16"])
LARGEST, SMALLEST = 64512.0, 2.0**-19
"""Of the scales that five bits of exponent and five of mantissa hold, zero left out."""


def all_words() -> tuple[Tensor, Tensor]:
    """Every word there is [65536, 1], and the bits of each as a number."""
    bits = torch.arange(1 << 16)
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)[:, None], bits


def stored(scale: float, offset: float) -> tuple[float, float]:
    word = store_affine(torch.tensor(scale), torch.tensor(offset), PACKED)
    read_scale, read_offset = load_affine(word, PACKED)
    return float(read_scale), float(read_offset)


# --- the packed word -----------------------------------------------------------------------------------------


def test_a_word_is_read_as_documented() -> None:
    """Bits 15..6 are a float with five bits of exponent and five of mantissa, bits 5..0 eighths of it plus 32."""
    words, bits = all_words()
    scale, offset = load_affine(words, PACKED)
    for word in range(0, 1 << 16, 37):
        exponent, mantissa, eighths = word >> 11, word >> 6 & 31, word % 64 - 32
        if exponent == 31:
            assert not math.isfinite(float(scale[word]))
            continue
        value = mantissa / 32 * 2.0**-14 if exponent == 0 else (1 + mantissa / 32) * 2.0 ** (exponent - 15)
        assert float(scale[word]) == value
        assert float(offset[word]) == (eighths / 8 - 1.5) * value
    assert torch.equal(bits[scale.isfinite()], torch.arange(31 << 11))


def test_every_word_that_is_written_is_read_back_and_written_again() -> None:
    """All but the zero scales with an offset, the numbers that are not finite, and -4 scales and the like, which a
    grid that is too narrow for its offset never has."""
    words, bits = all_words()
    scale, offset = load_affine(words, PACKED)
    written = scale.isfinite() & (scale > 0) & (bits % 64 >= 1)
    again = store_affine(scale[written], offset[written], PACKED)
    assert torch.equal(again, words[written])
    assert int(written.sum()) == ((31 << 5) - 1) * 63
    zero = store_affine(torch.zeros(1), torch.zeros(1), PACKED)
    assert zero.tolist() == [[32]]
    assert [float(x) for x in load_affine(zero, PACKED)] == [0.0, 0.0]


def test_a_larger_scale_is_never_a_smaller_word() -> None:
    scale = torch.logspace(-30, 17, 200_001, base=2.0)
    read, _ = load_affine(store_affine(scale, -1.5 * scale, PACKED), PACKED)
    assert bool((read.diff() >= 0).all())
    assert float(read[0]) == 0.0
    assert float(read[-1]) == LARGEST


@given(scale=st.floats(2.0**-14, LARGEST, width=32), middle=st.floats(-3.8, 3.8))
def test_scale_and_offset_are_within_their_resolution(scale: float, middle: float) -> None:
    """Half a unit of the fifth mantissa bit (and of the tenth, which is rounded first), and half an eighth."""
    read_scale, read_offset = stored(scale, (middle - 1.5) * scale)
    assert abs(read_scale - scale) <= scale * (2.0**-6 + 2.0**-11)
    read_middle = read_offset / read_scale + 1.5
    assert abs(read_middle * read_scale - middle * scale) <= read_scale / 16 * (1 + 1e-5)
    assert -4 <= read_middle <= 3.875


@given(scale=st.floats(2.0**-13, 100, width=32), middle=st.floats(-500, 500))
def test_a_grid_reaches_its_offset_however_far(scale: float, middle: float) -> None:
    """A grid that is too narrow is made wider, so that its middle comes out within 4% of where it should be."""
    read_scale, read_offset = stored(scale, middle - 1.5 * scale)
    assert read_scale >= scale * (1 - 2.0**-6 - 2.0**-11)
    read_middle = read_offset + 1.5 * read_scale
    assert abs(read_middle - middle) <= max(read_scale / 16, abs(middle) * 0.04) * (1 + 1e-5)


@given(
    scale=st.floats(2.0**-13, 1000, width=32),
    middle=st.floats(-8, 8),
)
def test_the_word_is_that_of_the_definition(scale: float, middle: float) -> None:
    expected_scale, expected_offset, sure = by_definition.packed_affine(
        scale, (middle - 1.5) * scale, bits=2, slack=1e-6 * scale * (1 + abs(middle))
    )
    if sure:
        assert stored(scale, (middle - 1.5) * scale) == pytest.approx((expected_scale, expected_offset), rel=1e-6)


# --- numbers beyond what is stored ---------------------------------------------------------------------------

NAN_BITS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FFF0000, -1, -0x10000, -0x400000)
"""Quiet and signalling NaNs, those of uninitialised memory and of GPU arithmetic (all bits set)."""


@either
@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize("bits", NAN_BITS)
def test_a_nan_stays_visible(fmt: object, count: int, bits: int) -> None:
    """In whichever of the two numbers, with whatever bits, alone and where the CPU works on eight at a time."""
    nan = torch.full((count,), bits, dtype=torch.int32).view(torch.float32)
    one = torch.ones(count)
    assert bool(nan.isnan().all())
    for scale, offset in ((nan, one), (one, nan), (nan, nan)):
        read = load_affine(store_affine(scale, offset, fmt), fmt)
        assert bool((3 * read[0] + read[1]).isnan().all())


@either
def test_what_is_too_large_saturates(fmt: object) -> None:
    for scale, offset in ((1e9, -1.5e9), (1e9, 0.0), (1.0, 1e9), (1.0, -1e9), (math.inf, 0.0), (1e30, -1e30)):
        read = load_affine(store_affine(torch.tensor([scale]), torch.tensor([offset]), fmt), fmt)
        assert all(bool(x.isfinite().all()) for x in read)
        assert 0 < float(read[0]) <= 65504


def test_what_is_too_small_becomes_zero_and_never_a_nan() -> None:
    for scale in (0.0, 1e-30, 2.0**-26, SMALLEST / 4):
        read_scale, read_offset = stored(scale, -1.5 * scale)
        assert (read_scale, read_offset) == (0.0, 0.0)
    assert stored(SMALLEST, -1.5 * SMALLEST) == (SMALLEST, -1.5 * SMALLEST)


# --- two fp16 numbers, and unbiasing -------------------------------------------------------------------------


def test_fp16_grids_are_two_fp16_numbers() -> None:
    scale, offset = gaussian(100).abs(), gaussian(100, seed=1)
    grid = store_affine(scale, offset, FP16)
    assert (grid.dtype, grid.shape) == (torch.float16, (100, 2))
    assert torch.equal(torch.stack(load_affine(grid, FP16), dim=-1), to_f16(torch.stack([scale, offset], -1)).float())


def test_parts_say_what_is_stored() -> None:
    for name, expected in {
        "kv2": (torch.int16, 1),
        "kv4": (torch.float16, 2),
        "int4": (torch.float16, 1),
        "fp8": (torch.float16, 1),
        "kivi2": (torch.float16, 2),
    }.items():
        fmt = get_format(name).value
        assert parts(fmt) == expected
        if fmt.offset:
            grid = store_affine(torch.ones(3, 5), torch.ones(3, 5), fmt)
            assert (grid.dtype, grid.shape) == (expected[0], (3, 5, expected[1]))


def test_unbiasing_makes_what_is_read_as_long_as_what_was_coded() -> None:
    row, read = gaussian(50, 64, seed=1), 0.8 * gaussian(50, 64, seed=1) + 0.1 * gaussian(50, 64, seed=2)
    gain = unbiasing(row.square().sum(-1), (row * read).sum(-1))
    torch.testing.assert_close((gain * (row * read).sum(-1)), row.square().sum(-1))


@given(energy=st.floats(0, 1e30), explained=st.floats(-1e30, 1e30))
def test_unbiasing_never_shrinks_and_at_most_doubles(energy: float, explained: float) -> None:
    gain = float(unbiasing(torch.tensor(energy), torch.tensor(explained)))
    assert 1.0 <= gain <= 2.0
