from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from evals.fake_engine import FakeEngine
from subten.engine import LLM, LoadedModel, SamplingParams, Tokenizer
from subten.errors import ContextLengthError, NumericalError, ParameterError
from subten.evals.retrieval import Answer, FormatRetrieval, Trial, measure_retrieval, write_lists
from subten.evals.retrieval_report import RetrievalRun, retrieval_json, retrieval_table
from subten.formats import get_format
from support.tiny_model import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer())
LINE = re.compile(r"key (\d{4}): (\d{5})\n")
RUN = RetrievalRun(
    model="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    context=1024,
    omitted={100: 1717, 200: 3417},
    seed=0,
    prefill="window",
    chunk_size=256,
)


@settings(max_examples=30)
@given(lines=st.integers(1, 30), trials=st.integers(1, 5), seed=st.integers(0, 5))
def test_a_prompt_is_a_list_and_one_of_its_keys_and_the_answer_is_its_value(
    lines: int, trials: int, seed: int
) -> None:
    written = write_lists(BYTES, [lines], trials, seed, context=10_000)
    assert written.omitted == {}
    assert len(written.trials[lines]) == trials
    for trial in written.trials[lines]:
        text = BYTES.decode(trial.prompt)
        table = dict(LINE.findall(text))
        assert len(table) == lines
        question = re.fullmatch(rf"({LINE.pattern}){{{lines}}}\nkey (\d{{4}}):", text)
        assert question is not None
        asked = question[4]
        assert BYTES.decode(trial.answer) == f" {table[asked]}\n"
        assert BYTES.decode(trial.prompt[trial.asked.start : trial.asked.stop]) == f"key {asked}: {table[asked]}\n"
    assert written == write_lists(BYTES, [lines], trials, seed, context=10_000)
    assert written.longest == max(len(t.prompt) + len(t.answer) for t in written.trials[lines])


def test_asked_lines_are_spread_over_the_list_and_every_trial_has_its_own() -> None:
    trials = write_lists(BYTES, [40], 4, 0, context=10_000).trials[40]
    assert [trial.asked.start // 16 for trial in trials] == [5, 15, 25, 35]
    assert len({trial.prompt for trial in trials}) == 4
    assert {t.prompt for t in write_lists(BYTES, [40], 4, 1, 10_000).trials[40]}.isdisjoint(t.prompt for t in trials)


class PairTokenizer(Tokenizer):
    """Two characters a token, from the start: a token may span the end of the question."""

    def __init__(self, odd: bool) -> None:
        self._odd = odd

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text = "x" * self._odd + text
        return [int.from_bytes(text[i : i + 2].encode()) for i in range(0, len(text), 2)]


@pytest.mark.parametrize("odd", [False, True])
def test_a_token_that_spans_the_end_of_the_question_belongs_to_the_answer(odd: bool) -> None:
    tokenizer = PairTokenizer(odd)
    (trial,) = write_lists(tokenizer, [1], 1, 0, context=100).trials[1]
    text = b"".join(i.to_bytes(2).lstrip(b"\0") for i in (*trial.prompt, *trial.answer)).decode()
    whole = re.fullmatch(rf"x?{LINE.pattern}\nkey (\d{{4}}): (\d{{5}})\n", text)
    assert whole is not None
    assert whole[1] == whole[3]
    assert whole[2] == whole[4]
    prompt = b"".join(i.to_bytes(2) for i in trial.prompt).decode()
    assert prompt == text[: len(prompt)]
    assert len(text) - len(prompt) in (7, 8)


def test_lists_that_do_not_fit_are_named_with_what_they_take() -> None:
    written = write_lists(BYTES, [50, 5, 20, 50], 2, 0, context=400)
    assert list(written.trials) == [5, 20]
    # Lines of 16 characters, an empty one, "key 1234:" and " 12345\n".
    assert written.omitted == {50: 50 * 16 + 1 + 9 + 7}
    assert written.longest == 20 * 16 + 17
    assert write_lists(BYTES, [20], 2, 0, context=20 * 16 + 17).omitted == {}


@pytest.mark.parametrize(
    ("lines", "trials", "error", "sentence"),
    [
        ([50, 40], 2, ContextLengthError, "a list of 40 lines takes 657 tokens and the context is 400"),
        ([], 2, ParameterError, r"lines is \[\]; give one or more lengths from 1 to 9000"),
        ([0, 5], 2, ParameterError, r"lines is \[0, 5\]"),
        ([9001], 2, ParameterError, r"lines is \[9001\]"),
        ([5], 0, ParameterError, "trials is 0; it must be 1 to 1000"),
        ([5], 1001, ParameterError, "trials is 1001; it must be 1 to 1000"),
    ],
)
def test_lists_that_can_not_be_written_are_one_clear_error(
    lines: list[int], trials: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        write_lists(BYTES, lines, trials, 0, context=400)


def retrieval(answers: Sequence[Answer], answers_16bit: Sequence[Answer], kv: str = "kv2") -> FormatRetrieval:
    trial = Trial(prompt=(1,) * 400, answer=(1, 2, 3), asked=range(100, 110))
    return FormatRetrieval(get_format(kv), 50, (trial,) * len(answers), tuple(answers), tuple(answers_16bit))


def test_recall_is_the_share_of_answers_that_are_right_in_every_token() -> None:
    answers = [Answer(-1, t) for t in ((1, 2, 3), (1, 2, 4), (0, 2, 3), (1, 2, 3))]
    assert retrieval(answers, answers).recall.value == 0.5


@pytest.mark.parametrize(
    ("tokens", "tokens_16bit", "same"),
    [
        ((1, 2, 3), (1, 2, 3), True),
        ((1, 2, 4), (1, 2, 3), False),
        ((1, 2, 3), (1, 2, 4), False),
        ((1, 5, 0), (1, 5, 9), True),
        ((1, 5, 0), (1, 6, 0), False),
        ((1, 2, 3), (9, 2, 3), False),
        ((9, 0, 0), (9, 2, 3), True),
    ],
)
def test_answers_are_compared_up_to_the_first_wrong_token_of_16_bit(
    tokens: tuple[int, ...], tokens_16bit: tuple[int, ...], same: bool
) -> None:
    assert retrieval([Answer(-1, tokens)], [Answer(-1, tokens_16bit)]).same_answer.value == same


def test_changes_of_log_probability_are_paired() -> None:
    hard_and_easy = [-9.0, -1.0, -5.0]
    result = retrieval(
        [Answer(x - 0.5, (1, 2, 3)) for x in hard_and_easy], [Answer(x, (1, 2, 3)) for x in hard_and_easy]
    )
    assert result.log_probability.value == pytest.approx(-5.5)
    assert (result.change.value, result.change.low, result.change.high) == pytest.approx((-0.5, -0.5, -0.5))


@given(
    kv=st.sampled_from(["kv2", "kivi2", "fp8", "bf16"]),
    sinks=st.integers(0, 150),
    recent=st.integers(0, 150),
    start=st.integers(0, 240),
    length=st.integers(1, 20),
    prompt=st.integers(270, 400),
)
def test_an_asked_line_is_in_codes_if_the_question_reads_every_token_of_it_so(
    kv: str, sinks: int, recent: int, start: int, length: int, prompt: int
) -> None:
    fmt = get_format(kv, sinks, recent)
    trial = Trial((1,) * prompt, (1,), range(start, start + length))
    answer = Answer(-1.0, (1,))
    result = FormatRetrieval(fmt, 50, (trial,), (answer,), (answer,))
    coded = [fmt.sinks <= position < fmt.sinks + fmt.coded_tokens(prompt) for position in trial.asked]
    assert result.asked_in_codes == (all(coded) and kv != "bf16")


def some_trials(count: int, length: int = 9, answer: int = 3) -> list[Trial]:
    draw = torch.randint(11, (count, length + answer), generator=torch.Generator().manual_seed(0)).tolist()
    return [Trial(tuple(row[:length]), tuple(row[length:]), range(1)) for row in draw]


@pytest.mark.parametrize("chunk", [1, 2, 4, 20])
def test_an_answer_is_scored_position_by_position_however_logits_come(chunk: int) -> None:
    engine, trials = FakeEngine(noise=0.7, chunk=chunk), some_trials(5)
    reference = FakeEngine(chunk=chunk)
    first, second = measure_retrieval(reference, [engine], {3: trials})
    assert first.answers == first.answers_16bit == second.answers_16bit
    assert (first.kv.name, second.kv.name, second.lines) == ("bf16", "kv2", 3)
    for trial, answer in zip(trials, second.answers, strict=True):
        before = (trial.prompt[-1], *trial.answer[:-1])
        logits = engine.logits(before).double()
        expected = logits.log_softmax(-1)[range(3), list(trial.answer)].sum().item()
        assert answer.log_probability == pytest.approx(expected)
        assert answer.tokens == tuple(logits.argmax(-1).tolist())
    # The prompt in chunks, the answer one token at a time; its last token predicts nothing.
    assert engine.calls == [([*t.prompt, *t.answer[:-1]], 2) for t in trials]
    assert engine.open == reference.open == 0


def test_a_one_token_answer_needs_no_decoding() -> None:
    engine = FakeEngine()
    (result,) = measure_retrieval(engine, [], {1: some_trials(2, answer=1)})
    assert [len(answer.tokens) for answer in result.answers] == [1, 1]
    assert [tail for _, tail in engine.calls] == [0, 0]


def test_results_are_in_order_of_length_then_engine_and_progress_adds_up() -> None:
    seen: list[tuple[int, int]] = []
    engines = [FakeEngine(0.1), FakeEngine(0.2)]
    trials = {3: some_trials(2), 7: some_trials(2, length=20)}
    results = measure_retrieval(FakeEngine(), engines, trials, lambda done, total: seen.append((done, total)))
    assert [(r.lines, r.kv.name) for r in results] == [(n, name) for n in (3, 7) for name in ("bf16", "kv2", "kv2")]
    total = 3 * (2 * 11 + 2 * 22)
    assert {t for _, t in seen} == {total}
    assert seen[-1][0] == total


def test_logits_that_are_not_finite_are_one_clear_error() -> None:
    engine = FakeEngine(noise=math.inf)
    with pytest.raises(NumericalError, match="kv2 cache"):
        measure_retrieval(FakeEngine(), [engine], {3: some_trials(1)})
    assert engine.open == 0


@pytest.mark.parametrize("prefill", ["window", "chunk"])
def test_right_answers_are_those_that_the_engine_generates(tiny_model: LoadedModel, prefill: Any) -> None:
    """Against real generation: answers that the model gives, and the same with each of their tokens changed."""

    def engine(kv: str) -> LLM:
        small = {"sinks": 4, "recent": 16}
        return LLM(tiny_model, kv=kv, max_context=200, max_batch=1, prefill=prefill, chunk_size=32, **small)

    reference, tested = engine("bf16"), engine("kv2")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    trials = []
    for trial in write_lists(BYTES, [6], 3, 0, context=200).trials[6]:
        given = reference.generate(list(trial.prompt), params)[0].token_ids
        answers = [given] + [(*given[:i], (given[i] + 1) % 256, *given[i + 1 :]) for i in range(4)]
        trials += [Trial(trial.prompt, answer, trial.asked) for answer in answers]
    wide, coded = measure_retrieval(reference, [tested], {6: trials})
    assert wide.recall.value == pytest.approx(1 / 5)
    for result, llm in ((wide, reference), (coded, tested)):
        generate = cache(lambda prompt, llm=llm: llm.generate(list(prompt), params)[0].token_ids)
        for trial, answer in zip(trials, result.answers, strict=True):
            generated = generate(trial.prompt)
            right = 0
            while right < 4 and generated[right] == trial.answer[right]:
                right += 1
            assert (answer.tokens == trial.answer) == (generated == trial.answer)
            assert answer.tokens[: right + 1] == generated[: right + 1]
            logits = torch.cat(list(llm.score((*trial.prompt, *trial.answer), 4))).double().log_softmax(-1)
            rows = range(len(trial.prompt) - 1, len(trial.prompt) + 3)
            assert answer.log_probability == pytest.approx(logits[rows, list(trial.answer)].sum().item(), rel=1e-5)
    assert wide.answers != coded.answers
    assert coded.asked_in_codes == 2 / 3


def results() -> list[FormatRetrieval]:
    return [
        retrieval([Answer(-1.25, (1, 2, 3)), Answer(-2.25, (1, 2, 4))], [Answer(-1, (1, 2, 3))] * 2, kv)
        for kv in ("bf16", "kv2")
    ]


def test_rows_have_the_documented_keys_and_units() -> None:
    wide, row = json.loads(retrieval_json(results(), RUN))
    assert (row["format"], row["lines"], row["trials"], row["prompt_tokens"]) == ("kv2", 50, 2, 400)
    assert (row["sinks"], row["recent"], row["asked_in_codes"], wide["asked_in_codes"]) == (64, 128, 1, 0)
    assert (row["recall"], row["same_answer"]) == (0.5, 0.5)
    assert row["log_probability"] == pytest.approx(-1.75)
    assert row["log_probability_change"] == pytest.approx(-0.75)
    assert row["log_probability_change_interval"][0] < -0.75 < row["log_probability_change_interval"][1]
    assert row["omitted"] == {"100": 1717, "200": 3417}
    assert (row["model"], row["seed"], row["context"], row["confidence"]) == ("tiny", 0, 1024, 0.95)
    assert set(row["versions"]) == {"subten", "torch", "python"}


def rendered(run: RetrievalRun) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(retrieval_table(results(), run))
    return console.export_text()


def test_the_table_fits_80_columns_and_names_what_was_omitted() -> None:
    text = rendered(RUN)
    assert "…" not in text
    omitted = "100 lines (1717 tokens), 200 lines (3417 tokens)"
    for shown in ("tiny", "kv2", "50%", "100%", "-1.75", "-0.75", omitted, "1024"):
        assert shown in text
    assert "too long" not in rendered(replace(RUN, omitted={}))
