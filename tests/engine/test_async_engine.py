"""`AsyncEngine`: streams, cancellation, disconnects, forks, failures and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.engine.serving import save_model
from tests.support.stepping import few_steps

from subten.engine import LLM, AsyncEngine, LoadedModel, SamplingParams, load_model
from subten.errors import ContextLengthError, EngineStoppedError, GuardError, ParameterError, SubtenError

SIZES = {"head_dim": 32, "num_hidden_layers": 1, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("model"), **SIZES), dtype="float64")


@pytest.fixture
def llm(model: LoadedModel) -> LLM:
    return LLM(model, kv="kv2-plain", max_context=400, max_batch=4, sinks=4, recent=8, prefix_cache=False)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def serve(llm: LLM, use: Callable[[AsyncEngine], Coroutine[Any, Any, Any]]) -> Any:
    """What `use` returns; behind it nothing is left in the cache."""

    async def run() -> Any:
        async with AsyncEngine(llm) as engine:
            return await use(engine)

    result = asyncio.run(run())
    llm.check_integrity()
    assert llm._books.pages.free == llm._books.pages.count
    assert llm._books.windows.free == llm._books.windows.count
    return result


def test_answers_are_those_of_the_llm(llm: LLM) -> None:
    prompts = [f"prompt number {n}" * n for n in range(1, 9)]
    expected = [llm.generate(prompt, greedy())[0] for prompt in prompts]

    async def use(engine: AsyncEngine) -> list:
        return await asyncio.gather(*(engine.generate(prompt, greedy()) for prompt in prompts))

    assert [answer for (answer,) in serve(llm, use)] == expected


def test_stream_is_generate_in_pieces(llm: LLM) -> None:
    whole = llm.generate("a stream of text", greedy())[0]

    async def use(engine: AsyncEngine) -> list:
        return [delta async for delta in engine.stream("a stream of text", greedy())]

    deltas = serve(llm, use)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


def test_a_stream_that_is_left_after_3_tokens_frees_its_pages_within_two_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    step = llm.loop.step

    def counted() -> None:
        running.append(llm.stats().running)
        step()

    monkeypatch.setattr(llm.loop, "step", counted)

    async def use(engine: AsyncEngine) -> None:
        with few_steps(llm.loop, 50) as steps:
            async with await engine.submit("another one" * 10, greedy(max_tokens=250)):
                stream = engine.stream("x" * 200, greedy(max_tokens=150))
                for _ in range(3):
                    await anext(stream)
                await stream.aclose()
                left = len(running)
                steps.more(6)
                while len(running) < left + 6:
                    await asyncio.sleep(0.001)
        assert 2 in running[:left]
        assert running[left + 2 :][:4] == [1] * 4

    serve(llm, use)


def test_a_task_that_is_cancelled_ends_its_request(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> int:
        with few_steps(llm.loop, 9):
            task = asyncio.create_task(engine.generate("x" * 100, greedy(max_tokens=290)))
            while (await engine.stats()).running == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await engine.stats()).running

    assert serve(llm, use) == 0


def test_a_cancelled_generation_says_so(llm: LLM) -> None:
    whole = llm.generate("abc", greedy(max_tokens=390))[0]

    async def use(engine: AsyncEngine) -> list:
        with few_steps(llm.loop, 9):
            generation = await engine.submit("abc", greedy(max_tokens=390))
            await anext(generation)
            generation.cancel()
            generation.cancel()
            return await generation.completions()

    (answer,) = serve(llm, use)
    assert answer.finish_reason == "cancelled"
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_several_answers_come_with_their_index(llm: LLM) -> None:
    params = SamplingParams(seed=5, n=3, max_tokens=6, ignore_eos=True)
    expected = llm.generate("three of them", params)

    async def use(engine: AsyncEngine) -> list:
        return [delta async for delta in engine.stream("three of them", params)]

    deltas = serve(llm, use)
    for answer in expected:
        pieces = [delta for delta in deltas if delta.index == answer.index]
        assert tuple(i for delta in pieces for i in delta.token_ids) == answer.token_ids


def test_one_of_several_answers_can_be_cancelled(llm: LLM) -> None:
    params = greedy(n=3, temperature=1.0, seed=1, max_tokens=30)
    whole = [completion.text for completion in serve(llm, lambda engine: engine.generate("Once upon", params))]

    async def use(engine: AsyncEngine) -> list[Any]:
        with few_steps(llm.loop, 9) as steps:
            async with await engine.submit("Once upon", params) as generation:
                await anext(generation)
                generation.cancel(0)
                generation.cancel(0)
                await engine.stats()  # Behind those wishes.
                steps.more(100)
                return await generation.completions()

    first, *others = serve(llm, use)
    assert first.finish_reason == "cancelled"
    assert [completion.text for completion in others] == whole[1:]


def test_forks_go_on_from_where_the_answer_is(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> tuple:
        with few_steps(llm.loop, 50):
            generation = await engine.submit("x" * 90, greedy(max_tokens=200))
            for _ in range(4):
                await anext(generation)
            forks = await generation.fork(2, [greedy(max_tokens=5), greedy(max_tokens=5, logit_bias={7: 100})])
        answers = [(await fork.completions())[0] for fork in forks]
        return answers, (await generation.completions())[0]

    (same, biased), parent = serve(llm, use)
    start = len(same.prompt_token_ids) - 90
    assert 4 <= start < 195
    assert same.prompt_token_ids[90:] == parent.token_ids[:start]
    assert same.token_ids == parent.token_ids[start : start + 5]
    assert same.cached_tokens == 90 + start - 1
    assert biased.token_ids == (7,) * 5


def test_forks_have_seeds_of_their_own(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> list:
        generation = await engine.submit("abc", SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
        return [(await fork.completions())[0] for fork in await generation.fork(3)]

    assert len({answer.token_ids for answer in serve(llm, use)}) == 3


def test_a_fork_of_a_finished_answer_continues_it(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> list:
        generation = await engine.submit("abc", greedy(max_tokens=3))
        await generation.completions()
        (fork,) = await generation.fork(1, [greedy(max_tokens=4)])
        return await fork.completions()

    (answer,) = serve(llm, use)
    assert answer.token_ids == llm.generate(list(answer.prompt_token_ids), greedy(max_tokens=4))[0].token_ids
    assert len(answer.prompt_token_ids) == 6


@pytest.mark.parametrize(
    ("n", "params", "words"),
    [
        (0, None, "n is 0"),
        (2, [greedy()], "1 params for 2"),
        (1, [greedy(n=2)], "n is 2 for a branch"),
        (1, [greedy(stop_token_ids=(999,))], "token id 999"),
        (1, [None], "params is a NoneType"),
        (1, [greedy(guard=lambda: 1 / 0)], "division by zero"),
    ],
)
def test_bad_forks(llm: LLM, n: int, params: list | None, words: str) -> None:
    async def use(engine: AsyncEngine) -> None:
        async with await engine.submit("abc", greedy()) as generation:
            with pytest.raises((ParameterError, GuardError), match=words):
                await asyncio.wait_for(generation.fork(n, params), 30)
            assert len((await generation.completions())[0].token_ids) == 12

    serve(llm, use)


def test_answers_that_do_not_exist(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> None:
        async with await engine.submit("abc", greedy(n=2)) as generation:
            for number in (2, -1):
                with pytest.raises(ParameterError, match=f"no answer {number}; they are numbered 0 to 1"):
                    await generation.fork(1, answer=number)
                with pytest.raises(ParameterError, match=f"no answer {number}"):
                    generation.cancel(number)
            assert {answer.finish_reason for answer in await generation.completions()} == {"length"}

    serve(llm, use)


def test_forks_of_an_answer_that_waits_for_the_prompt_go_on_without_the_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, step = threading.Event(), llm.loop.step

    def held() -> None:
        if begin.wait(0.001):
            step()

    monkeypatch.setattr(llm.loop, "step", held)

    async def use(engine: AsyncEngine) -> tuple:
        generation = await engine.submit("abc" * 20, greedy(n=3))
        forks = await generation.fork(2, [greedy(), greedy()], answer=1)
        generation.cancel(0)
        await engine.stats()  # Behind that wish.
        begin.set()
        answers = [(await asyncio.wait_for(fork.completions(), 30))[0] for fork in forks]
        return await generation.completions(), answers

    (first, *others), forks = serve(llm, use)
    assert first.finish_reason == "cancelled"
    assert len({answer.token_ids for answer in (*others, *forks)}) == 1


def test_a_bug_ends_the_wait_of_who_has_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(llm, "stats", broken)

    async def run() -> None:
        engine = AsyncEngine(llm)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(engine.stats(), 30)
        with pytest.raises(EngineStoppedError, match="a bug"):
            await engine.generate("abc", greedy())
        await engine.close()

    asyncio.run(run())


def test_what_is_submitted_just_before_the_engine_fails_ends_with_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = threading.Event()

    def broken() -> None:
        submitted.wait(30)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(llm, "stats", broken)

    async def run() -> None:
        engine = AsyncEngine(llm)
        asked = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)  # That wish is the first.
        generation = await engine.submit("abc", greedy(n=2))
        submitted.set()
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(asked, 30)
        answers = await asyncio.wait_for(generation.completions(), 30)
        assert [answer.finish_reason for answer in answers] == ["error"] * 2
        assert not llm.loop.busy
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "error"), [("", ParameterError), ([999], ParameterError), ("x" * 400, ContextLengthError)]
)
def test_bad_prompts(llm: LLM, prompt, error: type[Exception]) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(error):
            await engine.submit(prompt, greedy())

    serve(llm, use)


def test_closing_cancels_and_draining_waits(llm: LLM) -> None:
    async def close(drain: bool) -> list:
        engine = AsyncEngine(llm)
        with few_steps(llm.loop, 50):
            generation = await engine.submit("abc", greedy(max_tokens=20 if drain else 390))
            await anext(generation)
            await engine.close(drain=drain)
            await engine.close()
        with pytest.raises(SubtenError, match="closed"):
            await engine.submit("abc")
        return await generation.completions()

    assert asyncio.run(close(drain=False))[0].finish_reason == "cancelled"
    assert asyncio.run(close(drain=True))[0].finish_reason == "length"
    assert llm._books.pages.free == llm._books.pages.count


def test_an_error_of_the_engine_ends_all_streams_with_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a wire is loose")

    async def use(engine: AsyncEngine) -> list:
        with few_steps(llm.loop, 50):
            first = await engine.submit("abc", greedy(max_tokens=390))
            await anext(first)
            monkeypatch.setattr(llm._runner, "decode", broken)
        answers = await first.completions()
        with pytest.raises(SubtenError, match="a wire is loose"):
            await engine.submit("abc")
        return answers

    (answer,) = serve(llm, use)
    assert answer.finish_reason == "error"
    assert "a wire is loose" in str(answer.stop_reason)


def test_an_event_loop_that_is_gone_is_a_reader_that_is_gone(llm: LLM) -> None:
    started: list[AsyncEngine] = []

    async def leave() -> None:
        started.append(AsyncEngine(llm))
        await anext(await started[0].submit("abc", greedy(max_tokens=390)))

    with few_steps(llm.loop, 50) as steps:
        asyncio.run(leave())
        steps.more(1)  # What it adds is what finds nobody.
        deadline = time.monotonic() + 30
        while llm.loop.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not llm.loop.busy
    asyncio.run(started[0].close())
    assert llm._books.pages.free == llm._books.pages.count
