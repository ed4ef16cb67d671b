"""Who runs when: forks, preemption, the budget between tokens, and failures that are one request's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.engine.serving import load_float64, save_model

from subten.engine import LLM, LoadedModel, SamplingParams
from subten.engine.pacing import Pacer
from subten.engine.request import Request
from subten.engine.sampling import choice_seed
from subten.formats import PageLayout, get_format
from subten.kvcache import predicted_bytes

SIZES = {"head_dim": 32, "num_hidden_layers": 3, "max_position_embeddings": 512}
SETTINGS = {"kv": "kv2-plain", "max_context": 300, "sinks": 4, "recent": 8, "chunk_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_float64(save_model(tmp_path_factory.mktemp("model"), **SIZES))


def engine(model: LoadedModel, pages: int | None = None, **changes) -> LLM:
    options = {"max_batch": 4, "prefix_cache": False, **SETTINGS, **changes}
    if pages is not None:
        layout = PageLayout(get_format("kv2-plain", 4, 8), model.geometry.head_dim)
        options["cache_bytes"] = predicted_bytes(layout, model.geometry, pages, 2 * options["max_batch"])
    return LLM(model, **options)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def begin(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = llm.intake.requests(prompt, params)
    llm.loop.add(request)
    return request


def assert_empty(llm: LLM) -> None:
    llm.check_integrity()
    assert llm._books.pages.free == llm._books.pages.count
    assert llm._books.windows.free == llm._books.windows.count


# --- several answers, forks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["window", "chunk"])
def test_four_answers_are_four_cold_runs(model: LoadedModel, prefill: str) -> None:
    llm = engine(model, prefill=prefill)
    params = SamplingParams(seed=3, n=4, max_tokens=10, ignore_eos=True)
    answers = llm.generate(text(130), params)
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert [answer.cached_tokens for answer in answers] == [0, 130, 130, 130]
    for answer in answers:
        alone = llm.generate(text(130), replace(params, n=1, seed=choice_seed(3, answer.index)))[0]
        assert alone.token_ids == answer.token_ids
    assert len({answer.token_ids for answer in answers}) == 4
    assert_empty(llm)


def test_more_answers_than_fit_into_the_batch_wait(model: LoadedModel) -> None:
    llm = engine(model, max_batch=2)
    params = SamplingParams(seed=3, n=5, max_tokens=4, ignore_eos=True)
    answers = llm.generate(text(70), params)
    assert len({answer.token_ids for answer in answers}) == 5
    last = llm.generate(text(70), replace(params, n=1, seed=choice_seed(3, 4)))[0]
    assert last.token_ids == answers[4].token_ids
    assert_empty(llm)


def test_a_fork_of_four_is_four_cold_runs_and_takes_no_pages(model: LoadedModel) -> None:
    llm = engine(model, prefill="window", max_batch=5)
    parent = begin(llm, text(150), greedy(max_tokens=30))
    while len(parent.output) < 10:
        llm.loop.step()
    held = llm._books.held_pages()
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(4)]
    children = llm.intake.branches(parent, params)
    llm.loop.fork(parent, children)
    assert llm._books.held_pages() == held
    while llm.loop.busy:
        llm.loop.step()
    for child, own in zip(children, params, strict=True):
        assert child.reused == 159
        assert llm.generate([*text(150), *parent.output[:10]], own)[0].token_ids == tuple(child.output)
    assert tuple(parent.output) == llm.generate(text(150), greedy(max_tokens=30))[0].token_ids
    assert_empty(llm)


def test_a_fork_of_a_prompt_begins_where_the_prompt_is_done(model: LoadedModel) -> None:
    llm = engine(model)
    parent = begin(llm, text(150), greedy())
    llm.loop.step()
    assert 0 < parent.cached < 150
    children = llm.intake.branches(parent, [greedy(), greedy()])
    llm.loop.fork(parent, children)
    llm.loop.cancel(parent)
    while llm.loop.busy:
        llm.loop.step()
    assert children[0].output == children[1].output
    assert len(children[0].output) == 12
    assert children[1].reused == 150
    assert_empty(llm)


# --- preemption ------------------------------------------------------------------------------------------------


def test_requests_that_outgrow_the_memory_take_turns(model: LoadedModel) -> None:
    prompts = [text(75, seed=seed) for seed in range(4)]
    expected = [engine(model).generate(prompt, greedy(max_tokens=70))[0].token_ids for prompt in prompts]
    llm = engine(model, pages=9, reserve=1)
    answers = llm.generate(prompts, greedy(max_tokens=70))
    assert [answer.token_ids for answer in answers] == expected
    assert llm.stats().preemptions > 0
    assert_empty(llm)


def test_with_the_longest_answers_set_aside_nobody_is_preempted(model: LoadedModel) -> None:
    llm = engine(model, pages=9)
    answers = llm.generate([text(75, seed=seed) for seed in range(4)], greedy(max_tokens=70))
    assert [len(answer.token_ids) for answer in answers] == [70] * 4
    assert llm.stats().preemptions == 0
    assert_empty(llm)


def test_a_preempted_request_frees_its_pages_at_once_and_comes_back_first(model: LoadedModel) -> None:
    llm = engine(model, max_batch=1)
    first = begin(llm, text(150), greedy())
    while not first.output:
        llm.loop.step()
    second = begin(llm, text(20), greedy())
    llm._scheduler.preempt(first)
    assert_empty(llm)
    while first.finish_reason is None:
        llm.loop.step()
    assert not second.output
    assert tuple(first.output) == engine(model).generate(text(150), greedy())[0].token_ids
    llm.loop.cancel(second)
    assert_empty(llm)


# --- prompts beside streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0.001])
def test_a_stream_gets_a_token_in_every_step_of_a_long_prompt(model: LoadedModel, budget: float | None) -> None:
    """The smallest budget leaves one layer between two tokens."""
    llm = engine(model, itl_budget_ms=budget)
    stream = begin(llm, text(10), greedy(max_tokens=30))
    while not stream.output:
        llm.loop.step()
    prompt = begin(llm, text(200, seed=1), greedy())
    steps = 0
    while not prompt.output:
        before = len(stream.output)
        llm.loop.step()
        assert len(stream.output) == before + 1
        steps += 1
    chunks, layers = 4, SIZES["num_hidden_layers"]
    assert steps == (chunks if budget is None else chunks * layers)
    while llm.loop.busy:
        llm.loop.step()
    assert tuple(prompt.output) == llm.generate(text(200, seed=1), greedy())[0].token_ids
    assert tuple(stream.output) == llm.generate(text(10), greedy(max_tokens=30))[0].token_ids
    assert_empty(llm)


def test_a_prompt_that_is_cancelled_between_two_layers(model: LoadedModel) -> None:
    llm = engine(model, itl_budget_ms=0.001)
    stream = begin(llm, text(10), greedy(max_tokens=40))
    while not stream.output:
        llm.loop.step()
    prompt = begin(llm, text(200, seed=1), greedy())
    llm.loop.step()
    assert llm.loop._prefill is not None
    llm.loop.cancel(prompt)
    assert llm._books.held_pages() == llm.layout.pages_for(stream.cached)
    while llm.loop.busy:
        llm.loop.step()
    assert tuple(stream.output) == llm.generate(text(10), greedy(max_tokens=40))[0].token_ids
    assert_empty(llm)


def test_a_budget_is_divided_between_the_decode_step_and_layers() -> None:
    pacer = Pacer(0.010)
    assert pacer.layers(0.0) == 1  # Nothing is known yet.
    pacer.decoded(0.004)
    pacer.prefilled(3, 0.0015)
    assert pacer.layers(0.0) == 11  # A little is left over.
    assert pacer.layers(0.0051) == 1
    assert pacer.layers(0.0056) <= 0
    pacer.decoded(0.008)  # A slow step is believed at once,
    assert pacer.layers(0.0) == 3
    pacer.decoded(0.004)  # a fast one only little by little.
    assert pacer.layers(0.0) == 4
    pacer.ended(0.001)  # There is always room for the end of a chunk.
    assert pacer.layers(0.0) == 2


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prompt", "answer"])
def test_a_step_out_of_memory_fails_its_longest_request_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    prompts = [text(length, seed=length) for length in (20, 41, 3)]
    expected = [engine(model).generate(prompt, greedy())[0].token_ids for prompt in prompts]
    llm = engine(model)
    begun, taken = llm._runner.begin, llm._runner.decode_step._take

    def begin_or_fail(batch):
        step = begun(batch)
        if len(batch) == 3:

            def advance(layers: int) -> None:
                type(step).advance(step, 2)  # Some layers have been written to when it happens.
                raise torch.OutOfMemoryError("out of memory")

            step.advance = advance
        return step

    def take_or_fail(count, *rest):
        result = taken(count, *rest)
        if count == 3:
            raise torch.OutOfMemoryError("out of memory")
        return result

    if when == "answer":
        monkeypatch.setattr(llm._runner.decode_step, "_take", take_or_fail)
    else:
        monkeypatch.setattr(llm._runner, "begin", begin_or_fail)
    answers = llm.generate(prompts, greedy())
    assert answers[1].finish_reason == "error"
    assert "memory" in str(answers[1].stop_reason)
    assert [answers[0].token_ids, answers[2].token_ids] == [expected[0], expected[2]]
    assert_empty(llm)


def test_a_request_that_never_gets_its_pages_fails(model: LoadedModel) -> None:
    llm = engine(model, pages=6)
    held = llm._books.open().sequence
    llm._books.append(held, text(250))
    answers = llm.generate([text(250), text(20)], greedy())
    assert [answer.finish_reason for answer in answers] == ["error", "length"]
    assert "page" in str(answers[0].stop_reason)
    llm._books.free(held)
    assert_empty(llm)


def test_answers_of_a_prompt_that_fails_fail_with_it(model: LoadedModel) -> None:
    llm = engine(model, pages=6)
    held = llm._books.open().sequence
    llm._books.append(held, text(250))
    answers = llm.generate(text(250), greedy(n=3))
    assert [answer.finish_reason for answer in answers] == ["error"] * 3
    llm._books.free(held)
    assert_empty(llm)
