from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subten.engine.drawing import Knobs, choose, filter_scores, gumbel, mix, signed
from subten.engine.logprobs import TokenLogprobs, token_logprobs
from subten.engine.sampling import (
    SampleRow,
    SamplingParams,
    choice_seed,
    knobs_of,
    request_seed,
    sample,
)
from subten.errors import ParameterError

CPU = torch.device("cpu")


def rows_of(params: SamplingParams, count: int, first_seed: int = 0, position: int = 5) -> list[SampleRow]:
    return [SampleRow(params, seed=first_seed + index, position=position) for index in range(count)]


def knobs(*params: SamplingParams, seed: int = 0) -> Knobs:
    return knobs_of([(p, seed) for p in params], CPU)


def noise_of(keys: list[tuple[int, int]], vocab: int) -> torch.Tensor:
    seeds, positions = zip(*keys, strict=True)
    return gumbel(torch.tensor([signed(mix(seed)) for seed in seeds]), torch.tensor(positions), vocab)


def random_logits(batch: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed)) * 3


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "finite"),
        ("top_k", -1, "at least 0"),
        ("top_k", 1.5, "whole number"),
        ("top_k", True, "whole number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("min_p", -0.1, "between 0 and 1"),
        ("min_p", 1.1, "between 0 and 1"),
        ("seed", 2**63, "64-bit"),
        ("seed", 1.0, "64-bit"),
        ("max_tokens", 0, "at least 1"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("logit_bias", ((-1, 1.0),), "token ids of at least 0"),
        ("logit_bias", ((1, 101),), "between -100 and 100"),
        ("logit_bias", ((1, math.nan),), "between -100 and 100"),
        ("logit_bias", (("a", 1),), "token ids"),
        ("logit_bias", ((1,),), "token ids"),
        ("logprobs", 21, "between 0 and 20"),
        ("prompt_logprobs", -1, "between 0 and 20"),
        ("min_tokens", -1, "between 0 and max_tokens (256)"),
        ("min_tokens", 257, "between 0 and max_tokens (256)"),
        ("stop", "end", "tuple of non-empty strings"),
        ("stop", ("",), "tuple of non-empty strings"),
        ("stop_token_ids", (-1,), "token ids"),
        ("stop_token_ids", ("a",), "token ids"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_a_field_outside_its_range_is_named_with_value_and_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


def test_lists_are_kept_as_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias={5: -1.0})  # type: ignore[arg-type]
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == ((5, -1.0),)
    assert hash(params) == hash(dataclasses.replace(params))


def test_unseeded_requests_draw_different_seeds_and_seeded_ones_keep_theirs() -> None:
    assert len({request_seed(SamplingParams()) for _ in range(100)}) == 100
    assert request_seed(SamplingParams(seed=-7)) == -7


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0], [2.0, 2.0, 2.0]])
    assert sample(logits, rows_of(SamplingParams(temperature=0), 2)).tolist() == [1, 0]


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([1e-300, 0.1, 1.0, 50.0]))
@settings(max_examples=40, deadline=None)
def test_top_k_of_one_is_greedy(seed: int, temperature: float) -> None:
    logits = random_logits(4, 31, seed)
    drawn = sample(logits, rows_of(SamplingParams(temperature=temperature, top_k=1), 4))
    assert torch.equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_vanishing_temperature_is_greedy_without_overflow(temperature: float) -> None:
    logits = torch.tensor([[-3e4, 3e4, 2.9e4], [5.0, -1e30, 4.0]])
    assert sample(logits, rows_of(SamplingParams(temperature=temperature), 2)).tolist() == [1, 0]


def test_a_top_k_beyond_any_vocabulary_keeps_all() -> None:
    logits = random_logits(2, 20, 0)
    kept_all = sample(logits, rows_of(SamplingParams(top_k=0), 2))
    assert sample(logits, rows_of(SamplingParams(top_k=10**30), 2)).tolist() == kept_all.tolist()


@given(seed=st.integers(0, 2**32), top_k=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_top_k_keeps_exactly_the_k_most_probable(seed: int, top_k: int) -> None:
    scores = random_logits(1, 31, seed).round()  # rounding makes ties
    kept = filter_scores(scores, knobs(SamplingParams(top_k=top_k)))[0].isfinite()
    ranked = sorted(range(31), key=lambda v: (-scores[0, v].item(), v))
    assert set(kept.nonzero().flatten().tolist()) == set(ranked[:top_k])


@given(seed=st.integers(0, 2**32), top_p=st.floats(0.01, 0.999), top_k=st.sampled_from([0, 5]))
@settings(max_examples=60, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(seed: int, top_p: float, top_k: int) -> None:
    scores = random_logits(1, 31, seed)
    kept = filter_scores(scores, knobs(SamplingParams(top_p=top_p, top_k=top_k)))[0].isfinite()
    ranked = scores[0].double().sort(descending=True).values[: top_k or 31].softmax(-1)
    size = int(kept.sum())
    assert set(scores[0, kept].tolist()) == set(scores[0].sort(descending=True).values[:size].tolist())
    assert ranked[:size].sum() >= top_p - 1e-12
    assert ranked[: size - 1].sum() < top_p + 1e-12


@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([5, 1024, 1025, 1500]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    params=st.lists(any_params, min_size=1, max_size=3),
)
@settings(max_examples=40)
def test_filters_keep_what_a_full_sort_keeps(
    seed: int, vocab: int, spread: float, params: list[SamplingParams]
) -> None:
    # Rounded, so that ties straddle every boundary; nearly flat ones have a nucleus of most of the vocabulary.
    scores = (random_logits(len(params), vocab, seed) * spread).mul(4).round().div(4)
    kept = filter_scores(scores, knobs(*params)).isfinite()
    for row, p in enumerate(params):
        ranked = sorted(range(vocab), key=lambda v, row=row: (-scores[row, v].item(), v))[: p.top_k or vocab]
        mass = scores[row, ranked].double().softmax(-1)
        before = mass.cumsum(-1) - mass
        nucleus = [v for v, m in zip(ranked, before.tolist(), strict=True) if m < p.top_p - 1e-9 or p.top_p == 1]
        undecided = [v for v, m in zip(ranked, before.tolist(), strict=True) if abs(m - p.top_p) <= 1e-9]
        floor = scores[row].max().item() + (math.log(p.min_p) if p.min_p else -math.inf)
        expected = {v for v in nucleus if scores[row, v] >= floor}
        got = set(kept[row].nonzero().flatten().tolist())
        assert expected <= got <= expected | set(undecided)


def test_top_p_of_one_keeps_even_the_least_probable() -> None:
    scores = torch.tensor([[0.0, -80.0, -100.0]])
    assert filter_scores(scores, knobs(SamplingParams(top_p=1.0, top_k=3))).isfinite().all()


@given(seed=st.integers(0, 2**32), min_p=st.floats(0.001, 1.0))
@settings(max_examples=60, deadline=None)
def test_min_p_keeps_what_is_probable_enough_against_the_best(seed: int, min_p: float) -> None:
    scores = random_logits(1, 31, seed)
    kept = filter_scores(scores, knobs(SamplingParams(min_p=min_p)))[0].isfinite()
    probability = scores[0].double().softmax(-1)
    ratio = probability / probability.max()
    assert kept[ratio >= min_p * (1 + 1e-5)].all()
    assert not kept[ratio < min_p * (1 - 1e-5)].any()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """The statistic over cells that expect at least 5 draws, the rest pooled, and its degrees of freedom."""
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    cells = expected > 0
    assert counts[~cells].sum() == 0
    return float(((counts - expected)[cells] ** 2 / expected[cells]).sum()), int(cells.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.4),
        SamplingParams(temperature=2.0, top_k=6),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_have_the_exact_distribution(params: SamplingParams, varied: str) -> None:
    draws = 20_000
    logits = random_logits(1, 20, seed=11)
    rows = [
        SampleRow(params, seed=index if varied == "seed" else 3, position=index if varied == "position" else 9)
        for index in range(draws)
    ]
    counts = sample(logits.expand(draws, -1), rows).bincount(minlength=20)
    exact = filter_scores(logits / params.temperature, knobs(params))[0].double().softmax(-1)
    statistic, freedom = chi_square(counts, exact * draws)
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal; 4 sigma.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert normal < 4


@given(params=st.lists(any_params, min_size=1, max_size=6), seed=st.integers(0, 2**62), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_never_depends_on_its_batch(params: list[SamplingParams], seed: int, data: st.DataObject) -> None:
    logits = random_logits(len(params), 37, seed)
    rows = [SampleRow(p, seed=seed + index, position=index * 7) for index, p in enumerate(params)]
    together = sample(logits, rows)
    alone = torch.cat([sample(logits[index : index + 1], [row]) for index, row in enumerate(rows)])
    assert torch.equal(together, alone)
    order = data.draw(st.permutations(range(len(params))))
    assert torch.equal(sample(logits[order], [rows[index] for index in order]), together[order])


@given(seed=st.integers(0, 2**32), params=st.lists(any_params, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_what_device_memory_decides_is_what_the_host_samples(seed: int, params: list[SamplingParams]) -> None:
    logits = random_logits(len(params), 1500, seed)
    rows = [SampleRow(p, seed=seed + index, position=index * 7) for index, p in enumerate(params)]
    of_device = knobs_of([(row.params, row.seed) for row in rows], CPU)
    positions = torch.tensor([row.position for row in rows])
    assert torch.equal(choose(logits, of_device, positions, noise=True), sample(logits, rows))


def test_noise_is_bitwise_the_same_alone_and_in_a_batch() -> None:
    keys = [(seed, position) for seed in (0, -5, 2**63 - 1) for position in (0, 1, 100_000)]
    together = noise_of(keys, 1001)
    for index, key in enumerate(keys):
        assert torch.equal(noise_of([key], 1001)[0], together[index])


def test_noise_is_a_fixed_function_of_seed_and_position() -> None:
    # The reference values of SplitMix64 for the starting point that (seed 42, position 7) mixes to.
    def splitmix(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) % 2**64
        return word ^ word >> 31

    start = splitmix(splitmix(42) + 7)
    for index, value in enumerate(noise_of([(42, 7)], 50)[0].tolist()):
        word = splitmix((start + index * 0x9E3779B97F4A7C15) % 2**64)
        uniform = (word >> 1) / 2**63
        assert value == pytest.approx(-math.log(-math.log1p(-uniform)), abs=1e-5)


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated_and_gumbel() -> None:
    noise = noise_of([(s, p) for s in range(8) for p in range(8)], 2000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 5 / math.sqrt(2000)


def test_suppressed_tokens_are_never_taken_and_the_logits_are_left_alone() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0], [9.0, 8.0, 1.0]])
    before = logits.clone()
    rows = [
        SampleRow(SamplingParams(temperature=0), seed=0, position=0, suppressed=(0,)),
        SampleRow(SamplingParams(), seed=0, position=0, suppressed=(0, 1)),
    ]
    assert sample(logits, rows).tolist() == [1, 2]
    assert torch.equal(logits, before)


def test_a_bias_is_added_to_its_tokens_alone() -> None:
    logits = torch.zeros(2, 5)
    biased = SamplingParams(temperature=0, logit_bias={3: 1.0, 4: 0.5})
    rows = [SampleRow(biased, 0, 0), SampleRow(SamplingParams(temperature=0), 0, 0)]
    assert sample(logits, rows).tolist() == [3, 0]
    assert not logits.any()
    suppressed = dataclasses.replace(rows[0], suppressed=(3,))
    assert sample(logits[:1], [suppressed]).tolist() == [4]


def test_a_bias_of_100_is_a_command_and_one_of_minus_100_a_ban() -> None:
    params = [SamplingParams(logit_bias={7: 100}), SamplingParams(top_k=1, logit_bias={7: -100})]
    logits = random_logits(1, 50, seed=1)
    assert all(sample(logits, rows_of(params[0], 1, first_seed=seed)).item() == 7 for seed in range(50))
    logits[0, 7] = 30
    assert sample(logits, rows_of(params[1], 1)).item() != 7


def test_seeds_of_several_answers_are_different_and_the_first_is_the_requests_own() -> None:
    seeds = {choice_seed(seed, index) for seed in (-1, 0, 1, 2) for index in range(100)}
    assert len(seeds) == 400
    assert choice_seed(-1, 0) == -1
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_logprobs_are_those_of_a_softmax() -> None:
    logits = random_logits(3, 40, seed=2)
    expected = logits.log_softmax(-1)
    none, own, three = token_logprobs(logits, [5, 6, 7], [None, 0, 3])
    assert none is None
    assert own == TokenLogprobs(expected[1, 6].item(), ())
    assert [i for i, _ in three.top] == expected[2].topk(3).indices.tolist()
    assert [value for _, value in three.top] == expected[2].topk(3).values.tolist()
    assert three.logprob == expected[2, 7].item()
    assert token_logprobs(logits, [5, 6, 7], [None] * 3) == [None] * 3
    (everything,) = token_logprobs(logits[:1, :4], [1], [20])
    assert len(everything.top) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_taken(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 20.0, 1.0]], dtype=dtype)
    tokens = sample(logits, rows_of(SamplingParams(), 1))
    assert tokens.tolist() == [1]
    assert tokens.dtype == torch.int64
