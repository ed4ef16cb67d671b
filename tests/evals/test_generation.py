from __future__ import annotations

import io
import json
import math
from collections.abc import Generator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evals.fake_engine import FakeEngine
from subten.engine import LLM, Delta, LoadedModel, SamplingParams
from subten.errors import ContextLengthError, NumericalError, ParameterError
from subten.evals.generation import (
    LONGEST_PERIOD,
    Divergence,
    FormatTexts,
    cut_prompts,
    distinct_ngrams,
    looping_tokens,
    measure_generation,
)
from subten.evals.generation_report import GenerationRun, generation_json, generation_table
from subten.formats import get_format

RUN = GenerationRun(
    model="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    text_sha256="0" * 64,
    prompts=4,
    prompt_tokens=128,
    tokens=512,
    prefill="window",
    chunk_size=256,
)


def loops_by_definition(text: Sequence[int]) -> int:
    """Every end of the text, every period, every pair of tokens that must be the same."""
    longest = 0
    for length in range(1, len(text) + 1):
        end = text[len(text) - length :]
        for period in range(1, length // 3 + 1):
            if all(end[i] == end[i - period] for i in range(period, length)):
                longest = length
    return longest


@given(
    head=st.lists(st.integers(0, 2), max_size=12), body=st.lists(st.integers(0, 2), max_size=5), n=st.integers(0, 6)
)
def test_looping_tokens_are_those_of_the_definition(head: list[int], body: list[int], n: int) -> None:
    text = head + body * n
    assert looping_tokens(text) == loops_by_definition(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ([], 0),
        ([5], 0),
        ([5, 5], 0),
        ([5, 5, 5], 3),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 9),
        ([9, 2, 3, 1, 2, 3, 1, 2, 3], 0),
        ([9, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], 10),
        ([1, 1, 1, 2], 0),
        (list(range(LONGEST_PERIOD)) * 3, 3 * LONGEST_PERIOD),
        (list(range(LONGEST_PERIOD + 1)) * 3, 0),
    ],
)
def test_a_loop_is_at_the_end_and_repeats_three_times(text: list[int], tokens: int) -> None:
    assert looping_tokens(text) == tokens


def test_distinct_ngrams_are_a_share_of_all() -> None:
    assert distinct_ngrams([1, 2, 1, 2, 1], 1) == 2 / 5
    assert distinct_ngrams([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct_ngrams([1, 2, 3], 3) == 1
    assert distinct_ngrams([1, 2], 3) == 1


@given(
    length=st.integers(2, 9),
    count=st.integers(1, 6),
    extra=st.integers(0, 40),
    bos=st.lists(st.just(99), max_size=1),
)
def test_prompts_are_spread_over_the_text_and_do_not_overlap(
    length: int, count: int, extra: int, bos: list[int]
) -> None:
    taken = length - len(bos)
    text = list(range(100, 100 + count * taken + extra))
    prompts = cut_prompts(text, count, length, bos)
    assert all(len(prompt) == length and prompt[: len(bos)] == bos for prompt in prompts)
    starts = [prompt[len(bos)] - 100 for prompt in prompts]
    assert all(
        prompt[len(bos) :] == text[start : start + taken] for start, prompt in zip(starts, prompts, strict=True)
    )
    distances = {b - a for a, b in pairwise([*starts, len(text)])}
    assert min(distances) >= taken
    assert max(distances) - min(distances) <= 1


@pytest.mark.parametrize(
    ("tokens", "count", "length", "sentence"),
    [
        (100, 10, 20, "the text has 100 tokens and 10 prompts of 20 need 190"),
        (100, 0, 20, "0 prompts of 20 tokens can't be cut"),
        (100, 2, 1, "2 prompts of 1 tokens can't be cut"),
    ],
)
def test_prompts_that_can_not_be_cut_are_one_clear_error(tokens: int, count: int, length: int, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        cut_prompts(list(range(tokens)), count, length, [99])


def walk(engine: FakeEngine, token: int, tokens: int) -> list[int]:
    text: list[int] = []
    for _ in range(tokens):
        token = int(engine.logits([token])[0].argmax())
        text.append(token)
    return text


@pytest.mark.parametrize("tokens", [1, 6, 7])
def test_divergences_are_those_of_the_texts_and_gaps_those_of_the_16_bit_logits(tokens: int) -> None:
    reference, same, other = FakeEngine(), FakeEngine(), FakeEngine(noise=0.25)
    prompts = [[1, token] for token in range(11)]
    wide, equal, coded = measure_generation(reference, [same, other], prompts, tokens)
    assert wide.divergences == equal.divergences == (None,) * len(prompts)
    assert wide.texts == tuple(tuple(walk(reference, p[-1], tokens)) for p in prompts)
    assert coded.texts == tuple(tuple(walk(other, p[-1], tokens)) for p in prompts)
    assert any(coded.divergences)
    for prompt, expected, text, divergence in zip(prompts, wide.texts, coded.texts, coded.divergences, strict=True):
        if divergence is None:
            assert text == expected
            continue
        at = divergence.position
        assert text[:at] == expected[:at]
        assert text[at] != expected[at]
        row = reference.logits([[*prompt, *expected][len(prompt) - 1 + at]])[0].double().log_softmax(-1)
        assert divergence.gap == pytest.approx((row[expected[at]] - row[text[at]]).item(), rel=1e-5)
        assert divergence.gap > 0
    assert reference.open == same.open == other.open == 0


def test_progress_adds_up_to_the_tokens_of_all_texts() -> None:
    seen: list[tuple[int, int]] = []
    measure_generation(
        FakeEngine(), [FakeEngine(0.1)], [[1], [2], [3]], 5, lambda done, total: seen.append((done, total))
    )
    assert {total for _, total in seen} == {30}
    assert seen[-1][0] == 30


class FailingEngine(FakeEngine):
    """Gives up in the middle, as an engine whose logits are not finite."""

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Generator[Delta, None, None]:
        self.open += 1
        try:
            yield Delta("", (1,), None)
            yield Delta("", (), "error")
        finally:
            self.open -= 1


def test_a_failure_is_one_clear_error_and_leaves_nothing_open() -> None:
    failing = FailingEngine(0.1)
    with pytest.raises(NumericalError, match="the kv2 cache gives logits that are not finite"):
        measure_generation(FakeEngine(), [failing], [[1], [2]], 5)
    assert failing.open == 0


def test_an_interruption_leaves_nothing_open() -> None:
    engine = FakeEngine()

    def interrupt(done: int, _total: int) -> None:
        assert engine.open == 2
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_generation(engine, [], [[1], [2]], 5, interrupt)
    assert engine.open == 0


def test_a_text_that_does_not_fit_the_context_is_one_clear_error() -> None:
    engine = FakeEngine()
    engine.max_context = 12
    with pytest.raises(ContextLengthError, match="take 13 tokens and the context is 12; ask for fewer tokens"):
        measure_generation(FakeEngine(), [engine], [[1], [1, 2, 3]], 10)
    assert len(measure_generation(FakeEngine(), [engine], [[1], [1, 2, 3]], 9)) == 2


def test_texts_are_what_the_engine_generates(tiny_model: LoadedModel) -> None:
    def engine(kv: str) -> LLM:
        return LLM(
            tiny_model, kv=kv, max_context=100, max_batch=3, prefill="window", sinks=4, recent=8, chunk_size=16
        )

    text = torch.randint(256, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = cut_prompts(text, 3, 30)
    reference, tested = engine("bf16"), engine("kv2")
    wide, coded = measure_generation(reference, [tested], prompts, 40)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for result, kv in ((wide, "bf16"), (coded, "kv2")):
        assert result.texts == tuple(c.token_ids for c in engine(kv).generate(prompts, params))
    assert all(divergence is not None for divergence in coded.divergences)
    for prompt, own, other, divergence in zip(prompts, wide.texts, coded.texts, coded.divergences, strict=True):
        assert divergence is not None
        at = divergence.position
        assert (own[:at], own[at] == other[at]) == (other[:at], False)
        row = torch.cat(list(reference.score([*prompt, *own])))[len(prompt) - 1 + at].double().log_softmax(-1)
        assert divergence.gap == pytest.approx((row[own[at]] - row[other[at]]).item(), abs=1e-5)
    for llm in (reference, tested):
        assert llm.cache_usage().tokens <= 3 * 70
        llm.check_integrity()


def texts(kv: str, divergences: Sequence[Divergence | None]) -> FormatTexts:
    written = tuple(tuple(range(n, n + 6)) + (50,) * 4 for n in range(len(divergences)))
    return FormatTexts(get_format(kv), written, tuple(divergences))


def test_figures_are_means_over_the_texts() -> None:
    result = texts("kv2", [None, Divergence(4, 0.05), Divergence(1, 0.3), Divergence(9, 0.2)])
    assert result.same_tokens.value == (10 + 4 + 1 + 9) / 4
    assert result.same_tokens.high == 10
    assert (result.identical, result.near_ties, result.median_gap) == (1, 1, 0.2)
    assert result.loop_rate.value == pytest.approx(0.4)
    assert result.distinct(1).value == pytest.approx(0.7)
    assert texts("bf16", [None]).median_gap is None


RESULTS = [
    texts("bf16", [None] * 4),
    texts("kv2", [None, Divergence(4, 0.05), Divergence(1, 0.3), Divergence(9, 0.2)]),
]


def test_rows_have_the_documented_keys_and_units() -> None:
    wide, row = json.loads(generation_json(RESULTS, RUN))
    assert (row["format"], row["sinks"], row["recent"]) == ("kv2", 64, 128)
    assert (row["same_tokens"], wide["same_tokens"]) == (6, 10)
    assert (row["identical"], row["near_ties"], row["median_gap"], wide["median_gap"]) == (1, 1, 0.2, None)
    assert row["first_difference"] == [None, 4, 1, 9]
    assert row["gap"] == [None, 0.05, 0.3, 0.2]
    assert row["looping_tokens"] == [4, 4, 4, 4]
    assert row["loop_rate"] == pytest.approx(0.4)
    assert row["same_tokens_interval"][0] < 6 < row["same_tokens_interval"][1]
    assert {"distinct_1", "distinct_2", "distinct_3", "distinct_3_interval"} <= set(row)
    assert (row["prompts"], row["prompt_tokens"], row["tokens"], row["confidence"]) == (4, 128, 512, 0.95)
    assert math.isclose(row["distinct_1"], 0.7)


def test_the_table_fits_80_columns_and_shows_every_figure() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(generation_table(RESULTS, RUN))
    text = console.export_text()
    assert "…" not in text
    for shown in ("tiny", "512 greedy tokens", "kv2", "1 of 4", "1 of 3", "0.200", "40%", "0 of 0", "brackets"):
        assert shown in text
