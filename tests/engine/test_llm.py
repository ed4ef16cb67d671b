"""The behaviour of `LLM`: streams, ends, limits and failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.serving import save_model
from transformers import PreTrainedTokenizerFast

from subten.engine import LLM, LoadedModel, SamplingParams, load_model, runner
from subten.errors import (
    CacheMemoryError,
    ContextLengthError,
    KernelUnavailableError,
    NumericalError,
    ParameterError,
    UnknownFormatError,
)

SIZES = {"head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("model"), **SIZES))


@pytest.fixture
def llm(model: LoadedModel) -> LLM:
    return LLM(model, kv="kv2", max_context=400, max_batch=4, sinks=4, recent=8, prefix_cache=False)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **changes})


def test_stream_is_generate_in_pieces(llm: LLM) -> None:
    whole = llm.generate("a stream of text", greedy())[0]
    deltas = list(llm.stream("a stream of text", greedy()))
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(i for d in deltas for i in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason] == ["length"]


def test_streams_may_be_interleaved(llm: LLM) -> None:
    alone = [llm.generate(p, greedy())[0].text for p in ("one", "another one")]
    streams = [llm.stream(p, greedy()) for p in ("one", "another one")]
    texts = ["", ""]
    for deltas in zip(*streams, strict=True):
        texts = [text + delta.text for text, delta in zip(texts, deltas, strict=True)]
    assert texts == alone


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("x" * 200, greedy(max_tokens=100))
    for _ in range(3):
        next(stream)
    assert llm._books.pages.free < llm._books.pages.count
    stream.close()
    assert llm._books.pages.free == llm._books.pages.count
    llm.check_integrity()


def test_more_prompts_than_fit_are_queued(llm: LLM) -> None:
    prompts = [f"prompt number {n}" for n in range(11)]
    completions = llm.generate(prompts, greedy(max_tokens=5))
    assert [len(c.token_ids) for c in completions] == [5] * 11
    llm.check_integrity()


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    text = llm.generate("where does it stop", greedy(max_tokens=40))[0].text
    stop = text[5:7]
    completion = llm.generate("where does it stop", greedy(max_tokens=40, stop=(stop,)))[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_request(llm: LLM) -> None:
    tokens = llm.generate("stop token", greedy())[0].token_ids
    completion = llm.generate("stop token", greedy(stop_token_ids=(tokens[3],)))[0]
    cut = tokens.index(tokens[3]) + 1
    assert completion.token_ids == tokens[:cut]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[3])


def test_min_tokens_forbids_an_early_end(llm: LLM) -> None:
    first = llm.generate("early end", greedy())[0].token_ids[0]
    params = greedy(stop_token_ids=(first,), min_tokens=6)
    assert first not in llm.generate("early end", params)[0].token_ids[:6]


def test_generation_ends_with_the_context(model: LoadedModel) -> None:
    llm = LLM(model, kv="kv2", max_context=64, max_batch=1)
    completion = llm.generate(list(range(60)), greedy(max_tokens=50))[0]
    assert len(completion.token_ids) == 4
    assert completion.finish_reason == "length"


def test_damaged_numbers_fail_one_request_alone(model: LoadedModel, llm: LLM) -> None:
    fine = llm.generate("abc", greedy())[0]
    embedding = model.decoder.weights.embedding
    original = embedding[ord("Z")].clone()
    poisoned = llm.tokenizer.encode("Z")[0]
    original = embedding[poisoned].clone()
    try:
        embedding[poisoned] = torch.nan
        bad, good = llm.generate(["aZc", "abc"], greedy())
    finally:
        embedding[poisoned] = original
    assert bad.finish_reason == "error"
    assert "not finite" in str(bad.stop_reason)
    assert good.token_ids == fine.token_ids
    # Nothing of it stays behind in the pages that the next request gets.
    assert llm.generate("abc" * 30, greedy())[0].finish_reason == "length"
    llm.check_integrity()


def test_logprobs_of_answer_and_prompt_are_those_of_the_scores(model: LoadedModel) -> None:
    llm = LLM(model, kv="kv2", max_context=400, max_batch=4, sinks=4, recent=8, chunk_size=32, prefill="window")
    prompt = list(b"probable is what comes next, most of the time, and not always")
    llm.generate(prompt, greedy())  # What is in the cache of the prompt has to be computed all the same.
    params = greedy(logprobs=2, prompt_logprobs=1, n=2)
    answer, twin = llm.generate([*prompt, 65], params)
    tokens = [*prompt, 65, *answer.token_ids]
    expected = torch.cat(list(llm.score(tokens, decode_tail=len(answer.token_ids)))).log_softmax(-1)
    assert answer.cached_tokens == 0
    assert answer.prompt_logprobs[0] is None
    reports = [*answer.prompt_logprobs[1:], *answer.logprobs]
    assert len(reports) == len(tokens) - 1
    for position, report in enumerate(reports):
        assert report.logprob == pytest.approx(expected[position, tokens[position + 1]].item(), abs=1e-3)
        assert report.top[0][1] == pytest.approx(expected[position].max().item(), abs=1e-3)
    assert [len(report.top) for report in answer.logprobs] == [2] * 20
    assert twin.prompt_logprobs == answer.prompt_logprobs


def test_logits_of_a_long_chunk_come_in_parts(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scores, and as log-probabilities of a prompt: the same as of all its tokens at once."""
    prompts = ["a prompt that is in company" * 3, "one of its own" * 5]
    params = [greedy(max_tokens=3, prompt_logprobs=2), greedy(max_tokens=3)]
    results = []
    for size in (1000, 7):
        monkeypatch.setattr(runner, "LOGITS_AT_A_TIME", size)
        llm = LLM(model, kv="kv2", max_context=400, max_batch=2, sinks=4, recent=8, prefix_cache=False)
        parts = list(llm.score(list(range(3, 60))))
        assert [len(part) for part in parts] == ([57] if size == 1000 else [7] * 8 + [1])
        results.append((torch.cat(parts), llm.generate(prompts, params)))
    (whole, at_once), (cut, in_parts) = results
    assert torch.allclose(whole, cut, atol=1e-5)
    assert [completion.token_ids for completion in at_once] == [completion.token_ids for completion in in_parts]
    assert len(at_once[0].prompt_logprobs) == len(in_parts[0].prompt_logprobs) == len(prompts[0])
    for one, other in zip(at_once[0].prompt_logprobs[1:], in_parts[0].prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_stream_has_the_logprobs_of_generate(llm: LLM) -> None:
    whole = llm.generate("how probable", greedy(logprobs=2, stop=("\n",)))[0]
    deltas = list(llm.stream("how probable", greedy(logprobs=2, stop=("\n",))))
    assert tuple(report for delta in deltas for report in delta.logprobs) == whole.logprobs
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


def test_an_error_can_be_raised(model: LoadedModel, llm: LLM) -> None:
    embedding = model.decoder.weights.embedding
    original = embedding[90].clone()
    try:
        embedding[90] = torch.nan
        bad = llm.generate([1, 90, 2], greedy(n=2))
        (last,) = llm.stream([1, 90, 2], greedy())
    finally:
        embedding[90] = original
    for error in (bad[0].error, bad[1].error, last.error):
        assert isinstance(error, NumericalError)
    assert llm.generate([1, 2], greedy())[0].error is None


def test_a_request_that_fails_on_its_way_leaves_nothing_for_others_to_continue(model: LoadedModel) -> None:
    llm = LLM(model, kv="kv2", max_context=400, max_batch=4, sinks=4, recent=8)
    first = llm.generate("on its way", greedy())[0].token_ids[0]
    embedding = model.decoder.weights.embedding
    original = embedding[first].clone()
    try:
        embedding[first] = torch.nan
        bad = llm.generate("on its way", greedy())[0]
    finally:
        embedding[first] = original
    assert (bad.token_ids, bad.finish_reason) == ((first,), "error")
    answer = llm.generate([*llm.tokenizer.encode("on its way"), first, 5], greedy())[0]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", ParameterError, "no tokens"),
        ([], ParameterError, "no tokens"),
        ([5, 258], ParameterError, "token id 258"),
        ([-1], ParameterError, "token id -1"),
        ("x" * 400, ContextLengthError, "400 tokens and the context 400"),
        ("half \ud800", ParameterError, "not valid Unicode"),
        ([1.5], ParameterError, "1.5 is no token id"),
        (["a"], ParameterError, "'a' is no token id"),
        (b"abc", ParameterError, "bytes"),
        (torch.tensor([1, 2]), ParameterError, "Tensor"),
        (None, ParameterError, "NoneType"),
    ],
)
def test_bad_prompts(llm: LLM, prompt, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate([prompt], greedy())
    with pytest.raises(error, match=words):
        list(llm.stream(prompt, greedy()))
    llm.check_integrity()


def test_a_bad_prompt_leaves_the_others_unstarted(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 500], greedy())
    assert not llm.loop.busy


@pytest.mark.parametrize("prompts", [["a", 5], [5, "a"], [[1, 2], 5]])
def test_prompts_that_mix_tokens_and_texts(llm: LLM, prompts: list) -> None:
    with pytest.raises(ParameterError, match="mix token ids"):
        llm.generate(prompts, greedy())


@pytest.mark.parametrize("prompts", [b"abc", None, torch.tensor([1, 2])])
def test_prompts_of_no_kind(llm: LLM, prompts) -> None:
    with pytest.raises(ParameterError, match=type(prompts).__name__):
        llm.generate(prompts, greedy())


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], ["temperature"]])
def test_params_of_no_kind(llm: LLM, params) -> None:
    with pytest.raises(ParameterError, match="must be SamplingParams"):
        llm.generate(["one"], params)


def test_a_tail_of_less_than_nothing(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="decode_tail is -5"):
        list(llm.score([1, 2, 3], -5))


def test_scoring_longer_than_the_context(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="401 tokens and the context 400"):
        list(llm.score([1] * 401))


@pytest.mark.parametrize("changes", [{"stop_token_ids": (999,)}, {"logit_bias": {999: 1.0}}])
def test_tokens_that_do_not_exist(llm: LLM, changes: dict) -> None:
    with pytest.raises(ParameterError, match="token id 999 is outside"):
        llm.generate("one", greedy(**changes))
    assert not llm.loop.busy


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="2 params for 1 prompts"):
        llm.generate("one", [greedy(), greedy()])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv": "kv3"}, UnknownFormatError, "choose one of bf16"),
        ({"max_context": 513}, ParameterError, "1 to 512"),
        ({"max_context": 0}, ParameterError, "1 to 512"),
        ({"max_batch": 0}, ParameterError, "max_batch is 0"),
        ({"max_batch": -1, "sessions": -2}, ParameterError, "max_batch is -1"),
        ({"max_kld": -0.1}, ParameterError, "max_kld is -0.1"),
        ({"max_kld": float("nan")}, ParameterError, "max_kld is nan"),
        ({"chunk_size": 0}, ParameterError, "chunk_size is 0"),
        ({"itl_budget_ms": 0}, ParameterError, "itl_budget_ms is 0"),
        ({"reserve": 0}, ParameterError, "reserve is 0"),
        ({"prefill": "all"}, ParameterError, "window or chunk"),
        ({"sinks": -1}, UnknownFormatError, "0 or more"),
        ({"max_batch": 1, "max_context": 400, "cache_bytes": 420_000}, CacheMemoryError, "tokens would fit"),
    ],
)
def test_impossible_settings(model: LoadedModel, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(model, **options)


@pytest.mark.parametrize(("chunk_size", "max_context"), [(None, 300), (None, 200), (None, 1), (40, 300), (5, 300)])
def test_a_warm_up_takes_prompts_of_all_sizes_and_leaves_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, chunk_size: int | None, max_context: int
) -> None:
    """Up to a whole chunk, or all that the context has room for, without the logits of all its tokens."""
    llm = LLM(model, kv="kv2", max_context=max_context, max_batch=2, chunk_size=chunk_size, sinks=4, recent=8)
    run, score, chunks, scored = llm._runner.run, llm.score, [], []
    monkeypatch.setattr(llm._runner, "run", lambda batch: chunks.append(len(batch[0].token_ids)) or run(batch))
    monkeypatch.setattr(llm, "score", lambda tokens: scored.append(len(tokens)) or score(tokens))
    llm._warm_up()
    longest = min(chunk_size or 256, max_context)
    half = min(longest, max_context // 2)
    assert chunks == ([longest, half, half] if half else [longest])
    few = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65)
    assert {size for size in few if size <= longest} <= set(scored)
    assert max(scored) <= min(longest, 65)
    assert llm._books.lengths() == ()
    assert llm.stats().available_pages == llm.stats().pages


def test_what_fits_is_true(model: LoadedModel) -> None:
    with pytest.raises(CacheMemoryError) as caught:
        LLM(model, max_batch=1, max_context=400, cache_bytes=420_000)
    fitting = int(str(caught.value).rsplit(";", 1)[1].split()[0])
    llm = LLM(model, max_batch=1, max_context=fitting, cache_bytes=420_000)
    assert llm._runner.storage.nbytes <= 420_000
    completion = llm.generate([1] * (fitting - 4), greedy())[0]
    assert len(completion.token_ids) == 4
    with pytest.raises(CacheMemoryError):
        LLM(model, max_batch=1, max_context=fitting + 1, cache_bytes=420_000)


def test_a_context_limited_by_memory_is_announced(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(model, max_batch=1, cache_bytes=420_000)
    assert llm.max_context < 512
    assert f"the context is limited to {llm.max_context} tokens" in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "int8"}, ParameterError),
        ({"device": "tpu"}, ParameterError),
        ({"device": "meta"}, ParameterError),
        ({"kernels": {"moe": "gluon"}}, KernelUnavailableError),
    ],
)
def test_impossible_ways_to_load(tmp_path: Path, options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        load_model(save_model(tmp_path, **SIZES), **options)


def test_a_tokenizer_of_another_model_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(tmp_path, **SIZES)
    load_model(folder)
    assert "may not belong together" not in caplog.text
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<word {number}>" for number in range(1000)])
    tokenizer.save_pretrained(folder)
    load_model(folder)
    assert f"knows {len(tokenizer)} tokens and the model " in caplog.text
