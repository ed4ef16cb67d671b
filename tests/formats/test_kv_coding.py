from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from subten.formats import PAGE_SIZE, PageLayout, get_format
from subten.formats.codec import decode_keys, reconstruct_keys, through_records
from subten.formats.coding import (
    WHITENING,
    WHITENING_FLOOR,
    LayerMoments,
    calibrated_coding,
    pair_energy,
    uncalibrated_coding,
)
from subten.formats.shaping import DAMPING
from support import quantizers as by_definition
from support import shaped
from support.kv import (
    CALIBRATED_NAMES,
    CODED_NAMES,
    HEAD_DIMS,
    encode,
    gaussian,
    keys_with_bias,
    random_moments,
)

every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
every_calibrated = pytest.mark.parametrize("name", CALIBRATED_NAMES)


def with_choices(moments: LayerMoments, *, whiten: bool, shape: bool) -> LayerMoments:
    heads = moments.key.shape[0]
    return replace(
        moments,
        whiten_keys=torch.full((heads,), whiten),
        shape_keys=torch.full((heads,), shape),
    )


def whitening(moment: Tensor, kept: list[int]) -> np.ndarray:
    """The covariance to a negative power, of what is left without the kept channels: its mean variance is scaled to
    one, and some of that is added in all directions."""
    exact = moment.double().numpy().copy()
    exact[kept], exact[:, kept] = 0, 0
    values, vectors = np.linalg.eigh(exact / np.diag(exact).mean())
    return vectors @ np.diag((values + WHITENING_FLOOR) ** -WHITENING) @ vectors.T


# --- which channels, which space -----------------------------------------------------------------------------


@every_head_dim
@pytest.mark.parametrize("name", CODED_NAMES)
def test_a_calibration_suits_every_format(name: str, head_dim: int) -> None:
    fmt, moments = get_format(name), random_moments(3, head_dim)
    coding = calibrated_coding(fmt, moments)
    assert coding.kept_channels.shape == (3, 2 * fmt.key.kept_pairs)
    assert coding.kept_channels.dtype == torch.int64
    for side, tensor in ((coding.key, fmt.key), (coding.value, fmt.value)):
        assert (side is None) == (tensor.transform == "none")
        if side is not None:
            assert (side.shaper is None) == (tensor.rounding == "nearest")
            eye = torch.eye(head_dim).expand(3, -1, -1)
            torch.testing.assert_close(side.to_coded @ side.from_coded, eye, atol=1e-5, rtol=0)


def test_the_pair_with_the_most_energy_is_kept() -> None:
    """Of keys without their mean where the format takes that out, of whole keys otherwise."""
    moments = random_moments(2, 64)
    key = moments.key.clone()
    key[0, 5, 5], key[1, 63, 63] = 1e3, 1e3
    whole = torch.ones(2, 32)
    whole[0, 20], whole[1, 21] = 5, 5
    moments = replace(moments, key=key, pair_energy=whole)
    assert calibrated_coding(get_format("kv2"), moments).kept_channels.tolist() == [[5, 37], [31, 63]]
    assert calibrated_coding(get_format("kv2-plain"), moments).kept_channels.tolist() == [[20, 52], [21, 53]]


def test_pair_energy_is_the_mean_squared_length() -> None:
    keys = gaussian(100, 2, 64, seed=1)
    moment = torch.einsum("tgi,tgj->gij", keys, keys) / 100
    expected = (keys[..., :32].square() + keys[..., 32:].square()).mean(0)
    torch.testing.assert_close(pair_energy(moment), expected)


@every_head_dim
def test_the_coded_space_of_keys_is_as_defined(head_dim: int) -> None:
    moments = with_choices(random_moments(2, head_dim), whiten=True, shape=True)
    coding = calibrated_coding(get_format("kv2"), moments)
    rotation = by_definition.hadamard_matrix(head_dim)
    assert coding.key is not None
    for head in range(2):
        expected = whitening(moments.key[head], coding.kept_channels[head].tolist()) @ rotation
        np.testing.assert_allclose(coding.key.to_coded[head].numpy(), expected, atol=2e-5)


def test_where_whitening_was_not_found_good_the_space_is_hadamards() -> None:
    moments = with_choices(random_moments(2, 64), whiten=False, shape=True)
    coding = calibrated_coding(get_format("kv2"), moments)
    assert coding.key is not None
    assert coding.value is not None
    for side in (coding.key, coding.value):
        expected = np.broadcast_to(by_definition.hadamard_matrix(64), (2, 64, 64))
        np.testing.assert_allclose(side.to_coded.numpy(), expected, atol=1e-6)


@every_head_dim
def test_whitening_evens_out_the_keys(head_dim: int) -> None:
    """Directions that differ by some 100 to 1 in energy differ by less than 10 to 1 afterwards."""
    moments = with_choices(random_moments(2, head_dim), whiten=True, shape=True)
    coding = calibrated_coding(get_format("kv2"), moments)
    assert coding.key is not None
    for head, kept in enumerate(coding.kept_channels.tolist()):
        rest = [channel for channel in range(head_dim) if channel not in kept]
        before = moments.key[head][rest][:, rest].double()
        to_coded = coding.key.to_coded[head][rest].double()
        energies = torch.linalg.eigvalsh(before)
        after = torch.linalg.eigvalsh(to_coded.T @ before @ to_coded)[len(kept) :]
        assert float(energies[-1] / energies[0]) > 50
        assert float(after[-1] / after[0]) < 10


@every_head_dim
@every_calibrated
def test_kept_channels_do_not_reach_the_codes(name: str, head_dim: int) -> None:
    """Whatever is in them: neither whitening nor the metric mixes them with the others."""
    layout = PageLayout(get_format(name), head_dim)
    coding = calibrated_coding(layout.format, random_moments(2, head_dim))
    keys, values = gaussian(PAGE_SIZE, 2, head_dim), gaussian(PAGE_SIZE, 2, head_dim, seed=9)
    kept = coding.kept_channels[None].expand(PAGE_SIZE, -1, -1)
    plain = encode(layout, keys, values, coding)
    planted = encode(layout, keys.scatter(-1, kept, 100.0), values, coding)
    for plane in layout.planes:
        same = torch.equal(layout.view(plain, plane), layout.view(planted, plane))
        assert same == (plane != "kept_pair")


@every_calibrated
def test_scores_in_coded_space_are_scores_with_what_is_read(name: str) -> None:
    """q . k = q_kept . k_kept + (q_rest @ from_coded^T) . codes, as attention computes it."""
    layout = PageLayout(get_format(name), 128)
    coding = calibrated_coding(layout.format, random_moments(3, 128))
    keys, q = keys_with_bias(PAGE_SIZE, 3, 128), gaussian(3, 20, 128, seed=5).double()
    decoded = decode_keys(encode(layout, keys, keys, coding).transpose(0, 1), layout)
    assert coding.key is not None
    index = coding.kept_channels[:, None].expand(-1, 20, -1)
    rest = q.scatter(-1, index, 0.0) @ coding.key.from_coded.double().transpose(1, 2)
    scores = rest @ decoded.coded.double().transpose(1, 2)
    scores += q.gather(-1, index) @ decoded.kept.double().transpose(1, 2)
    read = reconstruct_keys(decoded, coding, layout).double()
    torch.testing.assert_close(scores, q @ read.transpose(1, 2), atol=1e-4, rtol=1e-4)


# --- what an error costs -------------------------------------------------------------------------------------


def test_metrics_are_what_queries_and_the_output_projection_see() -> None:
    """In coded space, where an error e of codes is the error e @ from_coded of a vector."""
    moments = with_choices(random_moments(2, 64), whiten=True, shape=True)
    coding = calibrated_coding(get_format("kv2"), moments)
    assert coding.key is not None
    assert coding.value is not None
    query = moments.query.double().clone()
    for head, kept in enumerate(coding.kept_channels.tolist()):
        query[head, kept], query[head, :, kept] = 0, 0
    for side, seen in ((coding.key, query), (coding.value, moments.output.double())):
        back = side.from_coded.double()
        metric = back @ seen @ back.transpose(1, 2)
        assert side.shaper is not None
        for head in range(2):
            order = side.shaper.order[head].numpy()
            expected = shaped.damped(metric[head].numpy())[np.ix_(order, order)]
            np.testing.assert_allclose(side.shaper.metric[head].numpy(), expected, rtol=1e-4, atol=1e-4)


def test_where_shaping_was_not_found_good_no_error_is_dearer_than_another() -> None:
    coding = calibrated_coding(get_format("kv2"), with_choices(random_moments(2, 64), whiten=True, shape=False))
    assert coding.key is not None
    assert coding.key.shaper is not None
    expected = ((1 + DAMPING) * torch.eye(64)).half().float()
    torch.testing.assert_close(coding.key.shaper.metric, expected.expand(2, -1, -1))
    assert not coding.key.shaper.feedback.any()


def test_both_sides_are_shaped_in_one_go_as_each_by_itself() -> None:
    """Keys and values on the same kind of grid go through one pass; a mixed format takes two. Same bytes."""
    moments = random_moments(2, 64)
    keys, values = keys_with_bias(PAGE_SIZE, 2, 64), gaussian(PAGE_SIZE, 2, 64, seed=9)
    together, keys_alone, values_alone = (
        (layout, encode(layout, keys, values, calibrated_coding(layout.format, moments)))
        for layout in (PageLayout(get_format(name), 64) for name in ("kv2", "kv2:fp8", "k4v2"))
    )
    for (layout, records), planes in (
        (keys_alone, ("key_codes", "key_scale", "kept_pair")),
        (values_alone, ("value_codes", "value_scale")),
    ):
        for plane in planes:
            assert torch.equal(layout.view(records, plane), together[0].view(together[1], plane))


@every_head_dim
@every_calibrated
def test_calibration_lowers_what_errors_cost(name: str, head_dim: int) -> None:
    """Of keys with the moments that were measured, and of any values: less than by the format alone."""
    fmt = get_format(name)
    layout = PageLayout(fmt, head_dim)
    moments = with_choices(random_moments(2, head_dim), whiten=True, shape=True)
    factor = torch.linalg.cholesky(moments.key.double()).float()
    keys = torch.einsum("tgi,gji->tgj", gaussian(512, 2, head_dim, seed=3), factor)
    values = gaussian(512, 2, head_dim, seed=4)
    calibrated = calibrated_coding(fmt, moments)
    by_format = uncalibrated_coding(fmt, head_dim, calibrated.kept_channels)
    costs = []
    for coding in (calibrated, by_format):
        read_keys, read_values = through_records(keys, values, coding, layout)
        for error, metric in ((read_keys - keys, moments.query), (read_values - values, moments.output)):
            costs.append(float(torch.einsum("tgi,gij,tgj->", error, metric, error)))
    assert costs[0] < 0.8 * costs[2], "keys"
    assert costs[1] < 0.8 * costs[3], "values"
