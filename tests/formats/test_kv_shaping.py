from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subten.formats import TensorFormat, get_format
from subten.formats.affine import load_affine
from subten.formats.hadamard import hadamard
from subten.formats.quantizers import GAUSSIAN_STEP, quantize
from subten.formats.shaping import NoiseShaper, descent_pass, shape
from support import shaped as by_definition
from support.kv import gaussian, random_moment

TWO_BITS, FOUR_BITS = get_format("kv2").value, get_format("kv4").value
either = pytest.mark.parametrize("fmt", [TWO_BITS, FOUR_BITS], ids=["2 bits", "4 bits"])
formats = st.sampled_from([TWO_BITS, FOUR_BITS])
METRICS = {
    "random": random_moment(1, 64),
    "steep": random_moment(1, 64, decades=5),
    "one direction": (lambda v: v.transpose(1, 2) @ v)(gaussian(1, 1, 64, seed=5)),
    "one coordinate": torch.diag(torch.arange(64) == 17).float()[None],
    "equal": torch.eye(64)[None],
    "none": torch.zeros(1, 64, 64),
}


def shaped(x: Tensor, metric: Tensor, fmt: TensorFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and offset."""
    codes, grid = shape(x, fmt, NoiseShaper.from_metric(metric), GAUSSIAN_STEP[fmt.bits])
    return codes, *load_affine(grid, fmt)


def read(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return codes * scale[..., None] + offset[..., None]


def cost(error: Tensor, metric: Tensor) -> Tensor:
    """e^T M e of errors [tokens, heads, n], in float64."""
    return torch.einsum("thi,hij,thj->th", error.double(), metric.double(), error.double())


def damped(metric: Tensor) -> Tensor:
    return torch.stack([torch.from_numpy(by_definition.damped(each)) for each in metric.double().numpy()])


# --- against the definition ----------------------------------------------------------------------------------


def assert_as_defined(x: Tensor, metric: Tensor, fmt: TensorFormat, sure_share: float = 0.6) -> None:
    codes, scale, offset = shaped(x, metric, fmt)
    sure = 0
    for head in range(x.shape[1]):
        exact = metric[head].double().numpy()
        moves = by_definition.ordered_moves(exact)
        for token in range(x.shape[0]):
            row = x[token, head].double().numpy()
            expected = by_definition.shaped_row(row, exact, fmt.bits, fmt.affine == "packed", moves)
            if expected.sure:
                assert codes[token, head].tolist() == expected.codes.tolist()
                assert float(scale[token, head]) == expected.scale
                assert float(offset[token, head]) == pytest.approx(expected.offset, rel=1e-6)
                sure += 1
    assert sure >= sure_share * x.shape[0] * x.shape[1]


@either
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rows_are_coded_as_defined(fmt: TensorFormat, head_dim: int) -> None:
    x = gaussian(24, 2, head_dim, seed=7) * 3 + gaussian(24, 2, 1, seed=8)
    assert_as_defined(x, random_moment(2, head_dim, seed=head_dim), fmt)


@either
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_any_metric_is_treated_as_defined(fmt: TensorFormat, metric: Tensor) -> None:
    assert_as_defined(gaussian(24, 1, 64, seed=9), metric, fmt)


# --- what shaping is for -------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    fmt=formats,
    seed=st.integers(0, 10_000),
    size=st.sampled_from([16, 64, 80, 128]),
    decades=st.floats(0, 4),
    spread=st.floats(0, 0.5),
)
def test_errors_cost_no_more_than_those_of_rounding_to_nearest(
    fmt: TensorFormat, seed: int, size: int, decades: float, spread: float
) -> None:
    """On average over many rows, whatever the metric; and much less where it has cheap directions. The rows are as
    a Hadamard transform leaves them, near a Gaussian, or with coordinates that differ by up to some 3 to 1."""
    x = gaussian(256, 2, size, seed=seed) * 10 ** (spread * gaussian(1, 2, size, seed=seed + 1) / 2)
    assert_cheaper_than_nearest(x, fmt, random_moment(2, size, seed + 2, decades), 0.8 if decades > 2 else 1.01)


@either
@pytest.mark.parametrize("outlier", [5.0, 10.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_so_it_is_for_rows_with_an_outlier(fmt: TensorFormat, head_dim: int, outlier: float) -> None:
    """A channel that is larger than all others, spread by the Hadamard transform (over 16 channels of 80)."""
    x = gaussian(256, 2, head_dim, seed=3)
    x[..., 7] += outlier * (1 + 0.3 * gaussian(256, 2, seed=4))
    for decades in (0.5, 2.0):
        assert_cheaper_than_nearest(hadamard(x), fmt, random_moment(2, head_dim, 5, decades), 1.02)


def assert_cheaper_than_nearest(x: Tensor, fmt: TensorFormat, metric: Tensor, share: float) -> None:
    counted, nearest = damped(metric), quantize(x, fmt)
    by_nearest = cost(x - read(nearest.codes, *load_affine(nearest.grid, fmt)), counted).mean(0)
    assert bool((cost(x - read(*shaped(x, metric, fmt)), counted).mean(0) <= share * by_nearest).all())


@settings(max_examples=40)
@given(
    bits=st.sampled_from([2, 4]),
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1, 15, 16, 17, 64, 100]),
    decades=st.floats(0, 4),
    outside=st.floats(0.5, 3),
)
def test_a_descent_never_raises_the_cost(bits: int, seed: int, size: int, decades: float, outside: float) -> None:
    """From any codes, for any target, also one far outside of the grid."""
    levels = 2**bits - 1
    metric = random_moment(2, size, seed, decades)
    target = levels * (0.5 + outside * gaussian(2, size, 50, seed=seed + 1) / 2)
    old = torch.randint(0, levels + 1, target.shape, generator=torch.Generator().manual_seed(seed)).float()
    shaper = NoiseShaper.from_metric(metric)
    new = descent_pass(target, old, shaper, levels)
    # `shaper.metric` lies in the order of rounding, and so do target and codes here.
    before, after = (cost((c - target).permute(2, 0, 1), shaper.metric) for c in (old, new))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert bool((new == new.round()).all())
    assert 0 <= float(new.min()) <= float(new.max()) <= levels
    again = descent_pass(target, new, shaper, levels)
    assert bool((cost((again - target).permute(2, 0, 1), shaper.metric) <= after * (1 + 1e-5)).all())


@either
@pytest.mark.parametrize("metric", [METRICS["random"], METRICS["steep"], METRICS["equal"]])
def test_what_is_read_is_unbiased_in_the_metric(fmt: TensorFormat, metric: Tensor) -> None:
    """Each row has its own length along itself, as the metric measures, up to the stored resolution."""
    x, exact = gaussian(1024, 1, 64, seed=3), damped(metric)
    rows = read(*shaped(x, metric, fmt)).double()
    length = torch.einsum("thi,hij,thj->th", rows, exact, x.double()) / cost(x, exact)
    # An offset rounded to eighths of a scale weighs more in a metric that sees the mean of a row.
    rounding = 2.0**-5 if fmt.affine == "packed" else 2.0**-9
    assert abs(float(length.mean()) - 1) <= rounding / 8
    assert float((length - 1).abs().max()) <= 1.5 * rounding


def test_an_equal_metric_shapes_nothing() -> None:
    """Every element then goes to the nearest level of the fitted grid, as without shaping."""
    x = gaussian(256, 2, 64, seed=3)
    codes, _, _ = shaped(x, torch.eye(64).expand(2, -1, -1), TWO_BITS)
    assert torch.equal(codes, quantize(x, TWO_BITS).codes)


# --- what must not change a result ---------------------------------------------------------------------------


@either
def test_heads_are_coded_each_by_itself(fmt: TensorFormat) -> None:
    x, metric = gaussian(40, 4, 64, seed=3), random_moment(4, 64, seed=4)
    order = torch.tensor([2, 0, 3, 1])
    for whole, permuted in zip(shaped(x, metric, fmt), shaped(x[:, order], metric[order], fmt), strict=True):
        assert torch.equal(whole[:, order], permuted)
    for head in range(4):
        one = slice(head, head + 1)
        for whole, alone in zip(shaped(x, metric, fmt), shaped(x[:, one], metric[one], fmt), strict=True):
            assert torch.equal(whole[:, one], alone)


@either
@pytest.mark.parametrize("size", [64, 80, 128])
def test_tokens_are_coded_each_by_itself(fmt: TensorFormat, size: int) -> None:
    """Bit for bit, in whatever company: what is in the cache must not depend on how a prompt was cut."""
    x, metric = gaussian(200, 16, size, seed=3), random_moment(16, size, seed=4)
    whole = shaped(x, metric, fmt)
    for step, tokens in ((1, 16), (2, 16), (7, 35), (31, 62), (33, 66), (64, 192), (100, 200)):
        parts = [shaped(part, metric, fmt) for part in x[:tokens].split(step)]
        for together, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), together[:tokens])


@settings(max_examples=20)
@given(fmt=formats, power=st.integers(-6, 9), seed=st.integers(0, 1000))
def test_a_power_of_two_on_the_row_is_one_on_its_grid(fmt: TensorFormat, power: int, seed: int) -> None:
    x, metric = gaussian(32, 2, 64, seed=seed), random_moment(2, 64, seed=4)
    codes, scale, offset = shaped(x, metric, fmt)
    scaled_codes, scaled_scale, scaled_offset = shaped(x * 2.0**power, metric, fmt)
    assert torch.equal(codes, scaled_codes)
    assert torch.equal(scale * 2.0**power, scaled_scale)
    if fmt.affine == "packed":  # as fp16 a small offset may be subnormal, and then it has fewer bits
        assert torch.equal(offset * 2.0**power, scaled_offset)
    else:
        torch.testing.assert_close(offset * 2.0**power, scaled_offset, rtol=0, atol=2.0**-24)


@settings(max_examples=20)
@given(fmt=formats, factor=st.floats(1e-3, 1e3))
def test_the_scale_of_a_metric_does_not_matter(fmt: TensorFormat, factor: float) -> None:
    x, metric = gaussian(32, 2, 64, seed=3), random_moment(2, 64, seed=4)
    (codes, *_), (scaled, *_) = shaped(x, metric, fmt), shaped(x, metric * factor, fmt)
    assert float((codes != scaled).any(-1).float().mean()) <= 0.1, "more than the rows that hang by a rounding"


# --- rows that break things ----------------------------------------------------------------------------------


@either
@pytest.mark.parametrize("value", [0.0, 5.0, -1.6e4, math.nan, math.inf, -math.inf, 1e30])
def test_a_strange_row_leaves_the_others_alone(fmt: TensorFormat, value: float) -> None:
    """Rows of zeros and constants are coded; what is not a number stays visible; and all others are as before."""
    x, metric = gaussian(40, 2, 64, seed=3), random_moment(2, 64, seed=4)
    sound = shaped(x, metric, fmt)
    x[17, 1] = value
    strange = shaped(x, metric, fmt)
    others = torch.ones(40, 2, dtype=torch.bool)
    others[17, 1] = False
    for before, after in zip(sound, strange, strict=True):
        assert torch.equal(before[others], after[others])
    codes, scale, offset = strange
    assert int(codes.max()) < 2**fmt.bits
    row = read(codes, scale, offset)[17:18, 1:]
    if math.isnan(value):
        assert bool(row.isnan().all())
    elif abs(value) < 1e5:
        # A packed offset is at most four scales: such a grid is too wide for a constant, and its error is shaped.
        assert bool((cost(row - value, damped(metric)[1:]) <= 0.03 * cost(row * 0 + value, damped(metric)[1:])).all())


@either
def test_a_single_nan_makes_its_row_nan(fmt: TensorFormat) -> None:
    x, metric = gaussian(40, 2, 64, seed=3), random_moment(2, 64, seed=4)
    for bits in (0x7FC00000, 0x7FFFFFFF, -1):  # a quiet NaN as most are, and two with all bits set
        x[5, 0, 63] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        codes, scale, offset = shaped(x, metric, fmt)
        assert bool(read(codes, scale, offset)[5, 0].isnan().all())
        assert bool(read(codes, scale, offset)[others_of(5, 0)].isfinite().all())


def others_of(token: int, head: int) -> Tensor:
    mask = torch.ones(40, 2, dtype=torch.bool)
    mask[token, head] = False
    return mask


@settings(max_examples=30)
@given(fmt=formats, seed=st.integers(0, 1000), size=st.sampled_from([16, 64, 80]), scale=st.floats(-20, 4))
def test_codes_stay_in_range_and_numbers_finite(fmt: TensorFormat, seed: int, size: int, scale: float) -> None:
    x = gaussian(33, 2, size, seed=seed) * 10**scale + gaussian(33, 2, 1, seed=seed + 1)
    codes, steps, offset = shaped(x.clamp(-16376, 16376), random_moment(2, size, seed + 2, 4), fmt)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 2**fmt.bits
    assert bool((steps >= 0).all())
    assert bool(read(codes, steps, offset).isfinite().all())


def test_a_large_metric_is_prepared_with_several_threads() -> None:
    """torch's batched LU fails there from 151 rows on, so preparing must not use one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shaper = NoiseShaper.from_metric(random_moment(4, 256))
    finally:
        torch.set_num_threads(threads)
    assert all(bool(getattr(shaper, name).isfinite().all()) for name in ("feedback", "descent", "coupling"))
    np.testing.assert_allclose(shaper.coupling.diagonal(dim1=-2, dim2=-1).numpy(), 1.0, rtol=1e-6)
