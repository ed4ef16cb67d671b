"""What users of quantised caches complain about elsewhere: results must not depend on chunking, company or forks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from tests.engine.serving import Driver, load_float64, save_model, scores

from subten.engine import LLM, LoadedModel, SamplingParams
from subten.formats import FORMATS
from subten.kvcache import predicted_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"max_context": 512, "max_batch": 8, "sinks": 4, "recent": 32}
HEAD_DIMS = (64, 80, 96, 128, 256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_float64(save_model(folder, head_dim=64, num_hidden_layers=2, max_position_embeddings=512))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv", FORMATS)
@limits(max_examples=6)
@given(
    length=st.integers(1, 257),
    chunk_size=st.integers(1, 130),
    tail=st.integers(0, 20),
    recent=st.sampled_from([8, 32]),
)
def test_any_chunking_is_one_chunk(
    model: LoadedModel, kv: str, length: int, chunk_size: int, tail: int, recent: int
) -> None:
    """With 8 recent tokens groups of any size are coded together, with 32 whole groups."""
    sizes = {**SMALL, "recent": recent}
    one = LLM(model, kv=kv, prefill="window", chunk_size=512, **sizes)
    many = LLM(model, kv=kv, prefill="window", chunk_size=chunk_size, **sizes)
    assert_same(scores(many, text(length), tail), scores(one, text(length)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_chunking_at_every_head_size(tmp_path: Path, head_dim: int) -> None:
    model = load_float64(save_model(tmp_path, head_dim=head_dim, num_hidden_layers=1, max_position_embeddings=512))
    sizes = {**SMALL, "recent": 8}
    for kv in ("kv2", "fp8", "kivi2"):
        one = LLM(model, kv=kv, prefill="window", chunk_size=512, **sizes)
        many = LLM(model, kv=kv, prefill="window", chunk_size=37, **sizes)
        assert_same(scores(many, text(200), 5), scores(one, text(200)))


@pytest.mark.parametrize(
    ("kv", "prefill"),
    [*((name, "chunk") for name in FORMATS), ("bf16", "window"), ("kv2", "window"), ("kivi2", "window")],
)
def test_a_batch_gives_what_its_members_give_alone(model: LoadedModel, kv: str, prefill: str) -> None:
    prompts = [text(length, seed=length) for length in (1, 5, 63, 64, 65, 257)]
    llm = LLM(model, kv=kv, prefill=prefill, chunk_size=64, prefix_cache=False, **SMALL)
    together = llm.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, together, strict=True):
        assert llm.generate(prompt, GREEDY)[0].token_ids == completion.token_ids
        assert len(completion.token_ids) == 8


@pytest.mark.parametrize("kv", FORMATS)
def test_a_fork_that_diverges_is_two_cold_runs(model: LoadedModel, kv: str) -> None:
    driver = Driver(model, kv)
    parent = driver.books.open().sequence
    shared, left, right = text(100), text(20, seed=1), text(70, seed=2)
    driver.step({parent: shared})
    hit = driver.books.fork(parent)
    driver.runner.copy(hit.copies)
    child = hit.sequence
    grown = [{parent: [a], child: [b]} for a, b in zip(left, right, strict=False)]
    for tokens in grown:
        both = driver.step(tokens)
    child_end = driver.step({child: right[len(left) :]})[child][-1]
    for tokens, got in (([*shared, *left], both[parent][-1]), ([*shared, *right], child_end)):
        cold = Driver(model, kv)
        sequence = cold.books.open().sequence
        assert_same(got, cold.step({sequence: tokens})[sequence][-1])
    driver.books.free(parent)
    driver.books.free(child)
    assert driver.books.pages.free == driver.books.pages.count
    driver.books.check_integrity()


@pytest.mark.parametrize("kv", FORMATS)
def test_a_warm_prefix_is_a_cold_run(model: LoadedModel, kv: str) -> None:
    warm = LLM(model, kv=kv, prefill="window", chunk_size=64, **SMALL)
    cold = LLM(model, kv=kv, prefill="window", chunk_size=64, prefix_cache=False, **SMALL)
    prompt = text(150)
    first = warm.generate(prompt, GREEDY)[0]
    conversation = [*prompt, *first.token_ids, *text(30, seed=3)]
    second = warm.generate(conversation, GREEDY)[0]
    # The last token of an answer was never fed back, so it is not in the cache.
    assert second.cached_tokens == len(prompt) + len(first.token_ids) - 1
    again = cold.generate(conversation, GREEDY)[0]
    assert again.cached_tokens == 0
    assert second.token_ids == again.token_ids
    warm.check_integrity()


def test_prefix_of_another_text_is_not_taken(model: LoadedModel) -> None:
    llm = LLM(model, kv="kv2", **SMALL)
    llm.generate(text(150), GREEDY)
    other = text(150)
    other[149] ^= 1
    assert llm.generate([*other, 7], GREEDY)[0].cached_tokens == 0


@pytest.mark.parametrize("kv", FORMATS)
def test_every_page_comes_back_and_bytes_are_as_predicted(model: LoadedModel, kv: str) -> None:
    llm = LLM(model, kv=kv, prefix_cache=False, **SMALL)
    books, storage = llm._books, llm._runner.storage
    llm.generate([text(n, seed=n) for n in (3, 90, 200)], GREEDY)
    books.check_integrity()
    assert books.pages.free == books.pages.count
    assert books.windows.free == books.windows.count
    predicted = predicted_bytes(llm.layout, model.geometry, books.pages.count, books.windows.count)
    assert storage.nbytes == predicted
    usage = [llm.cache_usage() for _ in llm.score(text(300))][-1]
    assert usage.held_bytes == llm.layout.cache_bytes(model.geometry, 300)
    assert usage.bits_per_element == 8 * usage.held_bytes / model.geometry.elements(300)


def test_seeded_sampling_does_not_depend_on_company(model: LoadedModel) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=10) for seed in range(6)]
    prompts = [text(20 + seed, seed=seed) for seed in range(6)]
    llm = LLM(model, kv="kv2", prefix_cache=False, **SMALL)
    together = llm.generate(prompts, params)
    for prompt, own, completion in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, own)[0].token_ids == completion.token_ids
    assert len({c.token_ids for c in together}) > 1


def test_the_chunk_rule_sees_more_than_the_window_rule(model: LoadedModel) -> None:
    exact = scores(LLM(model, kv="bf16", prefill="window", chunk_size=512, **SMALL), text(200))
    error = {}
    for rule in ("window", "chunk"):
        llm = LLM(model, kv="kv2", prefill=rule, chunk_size=128, **SMALL)
        error[rule] = float((scores(llm, text(200)) - exact).norm())
    assert 0 < error["chunk"] < error["window"]
