"""The engine with the attention of device kernels, in Triton's interpreter, against the engine with the reference."""

from __future__ import annotations

import pytest
import torch
from tests.engine.serving import Driver, reference_and_model

from subten.engine import LLM, LoadedModel, SamplingParams
from subten.engine.mixed_cache import MixedCacheScorer
from subten.errors import KernelUnavailableError
from subten.formats import get_format
from subten.kernels.attention import triton_paged
from subten.kernels.attention.triton_encode import Tile
from support.device_code import quicken_interpreter
from support.paged_attention import appended_by_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0
SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 258}
TOLERANCE = 0.02
"""Of logits of order one: a 16-bit key or a code may turn into its neighbour by the last bit of a norm."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per token."""
    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(Tile, "of", lambda count, padded: Tile(64, 1))
    monkeypatch.setattr(triton_paged, "TritonPagedAttention", appended_by_kernels)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return reference_and_model("qwen3", **SIZES)[1]


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine(model: LoadedModel, kv: str, attention: str, **sizes: int) -> LLM:
    windows = {} if kv == "bf16" else {"sinks": 2, "recent": 6}
    kernels = {"cached_attention": attention}
    return LLM(model, kv=kv, max_context=160, max_batch=3, chunk_size=48, kernels=kernels, **windows, **sizes)


@pytest.mark.parametrize(
    ("family", "kv"), [("llama", "kv2-plain"), ("qwen3", "kv4"), ("qwen3", "bf16"), ("olmoe-clip", "kv2-plain")]
)
def test_logits_of_chunks_and_single_tokens_are_those_of_the_reference(family: str, kv: str) -> None:
    """No norm of q and k; one per head, which the kernels do; one over all heads and a clip, which they do not."""
    model = reference_and_model(family, **SIZES)[1]
    expected, found = (
        torch.cat(list(engine(model, kv, attention).score(text(90), decode_tail=4)))
        for attention in ("torch", "triton")
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_of_a_batch_that_comes_and_goes(model: LoadedModel) -> None:
    """Prompts of several chunks and of one token begin while others decode; one is taken up where it had ended."""
    prompts, lengths = [text(70), text(1, seed=1), text(5, seed=2), text(50, seed=3)], (6, 4, 3, 2)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    llms = [engine(model, "kv2-plain", attention) for attention in ("torch", "triton")]
    first = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in llms]
    assert first[0] == first[1]
    conversation = [*prompts[0], *first[0][0], *text(12, seed=4)]
    second = [llm.generate(conversation, params[0])[0] for llm in llms]
    assert second[0].token_ids == second[1].token_ids
    assert second[0].cached_tokens == second[1].cached_tokens == 75
    for llm in llms:
        llm.check_integrity()


def test_forks_at_a_page_edge_do_not_write_to_each_other(model: LoadedModel) -> None:
    """The token that leaves next is coded before it leaves, here as the first one of a page that both forks hold."""
    driver = Driver(model, "kv2-plain", attention="triton")
    parent = driver.books.open().sequence
    shared = text(4 + 8 + 64)
    driver.step({parent: shared})
    hit = driver.books.fork(parent)
    driver.runner.copy(hit.copies)
    tails = {parent: text(3, seed=1), hit.sequence: text(3, seed=2)}
    for index in range(3):
        both = driver.step({sequence: [tokens[index]] for sequence, tokens in tails.items()})
    for sequence, tokens in tails.items():
        cold = Driver(model, "kv2-plain")
        alone = cold.books.open().sequence
        expected = cold.step({alone: [*shared, *tokens]})[alone][-1]
        torch.testing.assert_close(both[sequence][-1], expected, atol=TOLERANCE, rtol=0)


def test_a_cache_that_is_coded_in_some_layers_only(model: LoadedModel) -> None:
    tokens, kv = text(90), get_format("kv2-plain", 2, 6)
    results = []
    for attention in ("torch", "triton"):
        chosen = LoadedModel(**{**vars(model), "attention": attention})
        results.append(torch.cat(list(MixedCacheScorer(chosen, kv, [1], 90, chunk_size=40).score(tokens, 3))))
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=0)


def test_the_engine_says_which_attention_it_has(model: LoadedModel) -> None:
    assert engine(model, "kv2-plain", "triton").attention == "triton"
    assert engine(model, "kv2-plain", "triton").layout.ahead == 1
    plain = LLM(model, kv="kv2-plain", max_context=100)
    assert (plain.attention, plain.layout.ahead) == ("torch", 0)


def test_a_format_that_the_kernels_do_not_serve_is_refused(model: LoadedModel) -> None:
    with pytest.raises(KernelUnavailableError, match="do not serve the KV format 'kivi2'"):
        engine(model, "kivi2", "triton")
