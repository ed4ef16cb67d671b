"""The engine with the attention of device kernels, in Triton's interpreter, against the engine with the reference."""

from __future__ import annotations

import pytest
import torch
from tests.engine.serving import Driver, reference_and_model

from subten.engine import LLM, LoadedModel, SamplingParams
from subten.engine.mixed_cache import MixedCacheScorer
from subten.errors import KernelUnavailableError
from subten.formats import get_format
from subten.kernels.attention.triton_encode import Tile
from support.device_code import quicken_interpreter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0
SIZES = {
    "vocab_size": 258,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per token."""
    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(Tile, "of", lambda count, padded: Tile(64, 1))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return reference_and_model("qwen3", **SIZES)[1]


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine(model: LoadedModel, kv: str, attention: str, **sizes: float) -> LLM:
    windows = {} if kv == "bf16" else {"sinks": 2, "recent": 6}
    kernels = {"cached_attention": attention}
    return LLM(model, kv=kv, max_context=160, max_batch=3, chunk_size=48, kernels=kernels, **windows, **sizes)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("family", "kv"), [("llama", "kv2-plain"), ("qwen3", "kv4"), ("qwen3", "bf16"), ("olmoe-clip", "kv2-plain")]
)
def test_logits_of_chunks_and_single_tokens_are_those_of_the_reference(family: str, kv: str) -> None:
    """No norm of q and k; one per head, which the kernels do; one over all heads and a clip, which they do not.

    Where keys and values are coded, a rounding may turn a code into its neighbour: in few tokens an error of the size
    that the format makes in all.
    """
    model = reference_and_model(family, **SIZES)[1]
    found, expected, in_16_bit = (
        torch.cat(list(engine(model, name, attention).score(text(90), decode_tail=4)))
        for name, attention in ((kv, "triton"), (kv, "torch"), ("bf16", "torch"))
    )
    assert difference(found, expected) <= 0.001 + 0.1 * difference(expected, in_16_bit)


def test_greedy_tokens_of_a_batch_that_comes_and_goes(model: LoadedModel) -> None:
    """Prompts of several chunks and of one token begin while others decode; one is taken up where it had ended."""
    prompts, lengths = [text(70), text(1, seed=1), text(5, seed=2), text(50, seed=3)], (6, 4, 3, 2)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    llms = [engine(model, "bf16", attention) for attention in ("torch", "triton")]
    first = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in llms]
    assert first[0] == first[1]
    conversation = [*prompts[0], *first[0][0], *text(12, seed=4)]
    second = [llm.generate(conversation, params[0])[0] for llm in llms]
    assert second[0].token_ids == second[1].token_ids
    assert second[0].cached_tokens == second[1].cached_tokens >= 64
    for llm in llms:
        llm.check_integrity()


def test_prompts_layer_by_layer_beside_a_stream_that_is_saved_and_put_back(model: LoadedModel) -> None:
    """What a step keeps from one layer to the next must outlive the steps of others in between."""
    answers = []
    for attention in ("torch", "triton"):
        llm = engine(model, "fp8", attention, itl_budget_ms=0.001)
        (stream,) = llm.intake.requests(text(30), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        llm.loop.add(stream)
        while not stream.output:
            llm.loop.step()
        (prompt,) = llm.intake.requests(
            text(70, seed=1), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )
        llm.loop.add(prompt)
        llm.loop.step()
        llm._scheduler.preempt(stream)
        while llm.loop.busy:
            llm.loop.step()
        whole = engine(model, "fp8", attention)
        alone = [whole.generate(list(r.prompt), r.params)[0].token_ids for r in (stream, prompt)]
        assert [tuple(stream.output), tuple(prompt.output)] == alone
        answers.append(alone)
        llm.check_integrity()
    assert answers[0] == answers[1]


def test_forks_at_a_page_edge_do_not_write_to_each_other(model: LoadedModel) -> None:
    """The token that leaves next is coded before it leaves, here into a page that both hold and nobody reads yet."""
    forked, cold = (Driver(model, "fp8", attention="triton", recent=1) for _ in range(2))
    shared = text(4 + 1 + 64)
    pairs = {}
    for driver in (forked, cold):
        first = driver.books.open().sequence
        driver.step({first: shared})
        if driver is forked:
            hit = driver.books.fork(first)
            driver.runner.copy(hit.copies)
        else:
            hit = driver.books.open()
            driver.step({hit.sequence: shared})
        pairs[driver] = first, hit.sequence
    for tokens in zip(text(3, seed=1), text(3, seed=2), strict=True):
        one, other = (
            driver.step({sequence: [token] for sequence, token in zip(pairs[driver], tokens, strict=True)})
            for driver in (forked, cold)
        )
        assert all(torch.equal(*logits) for logits in zip(one.values(), other.values(), strict=True))


def test_a_cache_that_is_coded_in_some_layers_only(model: LoadedModel) -> None:
    tokens, kv = text(90), get_format("kv2-plain", 2, 6)
    results = []
    for attention in ("torch", "triton"):
        chosen = LoadedModel(**{**vars(model), "attention": attention})
        results.append(torch.cat(list(MixedCacheScorer(chosen, kv, [1], 90, chunk_size=40).score(tokens, 3))))
    assert difference(results[1], results[0]) <= 0.03


def test_the_engine_says_which_attention_it_has(model: LoadedModel) -> None:
    assert engine(model, "kv2-plain", "triton").attention == "triton"
    assert engine(model, "kv2-plain", "triton").layout.ahead == 1
    plain = LLM(model, kv="kv2-plain", max_context=100)
    assert (plain.attention, plain.layout.ahead) == ("torch", 0)


def test_a_format_that_the_kernels_do_not_serve_is_refused(model: LoadedModel) -> None:
    with pytest.raises(KernelUnavailableError, match="do not serve the KV format 'kivi2'"):
        engine(model, "kivi2", "triton")
