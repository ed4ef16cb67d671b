"""Hundreds of random requests on a cache that is too small for them: nothing leaks, and no answer shows it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from tests.engine.serving import load_float64, save_model

from subten.engine import LLM, AsyncEngine, Completion, LoadedModel, SamplingParams
from subten.engine.sampling import choice_seed
from subten.errors import ContextLengthError, ParameterError
from subten.formats import PageLayout, get_format
from subten.kvcache import predicted_bytes

AT_ONCE = 40
BATCH = 6
PAGES = 12
CONTEXT = 200
VOCAB = 258
POISON = 255
"""A token whose embedding is NaN."""
SETTINGS = {"sinks": 4, "recent": 8, "max_context": CONTEXT, "prefill": "window", "chunk_size": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    sizes = {"hidden_size": 96, "head_dim": 32, "num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    model = load_float64(save_model(tmp_path_factory.mktemp("model"), **sizes))
    model.decoder.weights.embedding[POISON] = float("nan")
    return model


def crowded(model: LoadedModel, kv: str, **changes) -> LLM:
    """An engine with memory for two or three of the longest sequences, which admits more than that."""
    layout = PageLayout(get_format(kv).with_windows(4, 8), model.geometry.head_dim)
    size = predicted_bytes(layout, model.geometry, PAGES, 2 * BATCH)
    options = {"max_batch": BATCH, "cache_bytes": size, "reserve": 1, **SETTINGS, **changes}
    return LLM(model, kv=kv, **options)


class Alone:
    """Answers of an engine that has nothing else to do."""

    def __init__(self, model: LoadedModel, kv: str) -> None:
        llm = LLM(model, kv=kv, max_batch=1, prefix_cache=False, **SETTINGS)
        self.answer = cache(lambda prompt, params: llm.generate(list(prompt), params)[0])

    def check(self, found: Completion, params: SamplingParams, seed: int) -> None:
        """An answer is what its prompt gives alone; one that was cut short, what that begins with."""
        own = replace(params, n=1, seed=seed)
        expected = self.answer(found.prompt_token_ids, own)
        if found.finish_reason == "cancelled":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
            assert expected.text.startswith(found.text)
        else:
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert [[i for i, _ in own.top] for own in found.logprobs] == [
                [i for i, _ in own.top] for own in expected.logprobs
            ]
            assert [own.logprob for own in found.logprobs] == pytest.approx(
                [own.logprob for own in expected.logprobs], abs=1e-5
            )


@dataclass
class Client:
    """Users of one engine: each asks for something, and some of them leave early, branch off, or ask for nonsense."""

    engine: AsyncEngine
    seen: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[Completion, SamplingParams, int]] = field(default_factory=list)
    """Each with its parameters and its seed."""

    async def ask(self, number: int) -> None:
        rng = random.Random(number)
        if rng.random() < 0.1:
            await self._ask_nonsense(rng)
        else:
            await self._ask_sense(rng)

    async def _ask_nonsense(self, rng: random.Random) -> None:
        prompt, options, error = rng.choice(
            [
                ([], {}, ParameterError),
                ([VOCAB], {}, ParameterError),
                ([1] * CONTEXT, {}, ContextLengthError),
                ([1], {"stop_token_ids": (VOCAB,), "min_tokens": 1}, ParameterError),
                ([1], {"logit_bias": {VOCAB: 1.0}}, ParameterError),
            ]
        )
        with pytest.raises(error):
            await self.engine.submit(prompt, SamplingParams(**options))
        self.seen["nonsense"] += 1

    async def _ask_sense(self, rng: random.Random) -> None:
        params = random_params(rng)
        generation = await self.engine.submit(random_prompt(rng), params)
        forks = []
        leaves_after = rng.choice([0, 3, 9]) if rng.random() < 0.3 else None
        forks_after = rng.choice([0, 2, 6]) if rng.random() < 0.2 else None
        count = 0
        while True:
            if forks_after is not None and count >= forks_after:
                forks_after, branch = None, replace(params, n=1, seed=rng.randrange(99), max_tokens=8, min_tokens=0)
                forks = [
                    (fork, branch)
                    for fork in await self.engine.fork(generation, 2, [branch, branch], rng.randrange(params.n))
                ]
            if leaves_after is not None and count >= leaves_after:
                generation.cancel()
                leaves_after = None
            try:
                delta = await anext(generation)
            except StopAsyncIteration:
                break
            count += len(delta.token_ids)
        for answer in await generation.completions():
            self._keep(answer, params, choice_seed(params.seed, answer.index))
        for fork, branch in forks:
            self._keep((await fork.completions())[0], branch, branch.seed)
            self.seen["fork"] += 1

    def _keep(self, answer: Completion, params: SamplingParams, seed: int) -> None:
        self.seen[answer.finish_reason] += 1
        self.seen["cached"] += answer.cached_tokens
        self.answers.append((answer, params, seed))


def random_prompt(rng: random.Random) -> list[int]:
    """One of a few long texts, cut anywhere: many begin alike. A few hold the token that is not a number."""
    shared = random.Random(rng.randrange(6))
    text = [shared.randrange(POISON) for _ in range(CONTEXT - 30)]
    prompt = text[: rng.choice([1, 5, 13, 48, 76, 77, rng.randrange(1, len(text))])]
    return [*prompt, POISON] if rng.random() < 0.03 else prompt


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([1, 4, 8, 14])
    return SamplingParams(
        temperature=rng.choice([0, 0.5, 1.0]),
        top_k=rng.choice([0, 0, 4]),
        top_p=rng.choice([1.0, 0.8]),
        seed=rng.randrange(1000),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        n=rng.choice([1, 1, 1, 1, 3]),
        stop=rng.choice([(), ("a",), ("e", "th")]),
        stop_token_ids=rng.choice([(), (65, 66, 67)]),
        ignore_eos=rng.random() < 0.5,
        logit_bias=rng.choice([{}, {97: 2.0, 101: -100.0}]),
        logprobs=rng.choice([None, None, 0, 3]),
    )


def assert_nothing_is_left(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    llm.check_integrity()
    assert stats.available_pages == stats.pages
    llm._books.drop_snapshots()
    assert llm._books.pages.free == llm._books.pages.count
    assert llm._books.windows.free == llm._books.windows.count


def preempt_now_and_then(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are too short here to outgrow what they begin with, so some are asked to leave, before every second
    step."""
    rng, numbers, step = random.Random(0), itertools.count(), llm.loop.step

    def disturbed() -> None:
        decoding = [r for r in llm._scheduler._running if not r.prefilling]
        if decoding and next(numbers) % 2:
            llm._scheduler.preempt(rng.choice(decoding))
        step()

    monkeypatch.setattr(llm.loop, "step", disturbed)


@pytest.mark.parametrize(
    ("kv", "budget", "count"), [("bf16", None, 300), ("kv2-plain", None, 140), ("kv2-plain", 5.0, 60)]
)
def test_random_requests_leave_nothing_and_are_what_they_are_alone(
    model: LoadedModel, kv: str, budget: float | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 of them, in a format without windows, with windows, and with prompts taken some layers at a time."""
    llm = crowded(model, kv, itl_budget_ms=budget)
    preempt_now_and_then(llm, monkeypatch)

    async def serve() -> Client:
        async with AsyncEngine(llm) as engine:
            client = Client(engine)
            room = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with room:
                    await client.ask(number)

            await asyncio.gather(*(one(number) for number in range(count)))
            return client

    client = asyncio.run(serve())
    # Everything that may happen has happened.
    assert {"stop", "length", "error", "cancelled", "nonsense", "fork"} <= client.seen.keys()
    assert client.seen["cached"] > 0
    assert llm.stats().preemptions > 10
    assert_nothing_is_left(llm)
    alone = Alone(model, kv)
    for answer, params, seed in client.answers:
        alone.check(answer, params, seed)
