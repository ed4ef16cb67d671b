from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals.fake_engine import VOCAB, FakeEngine
from subten.engine import LLM, LoadedModel
from subten.errors import NumericalError, ParameterError
from subten.evals.quality import FormatQuality, cut_windows, measure


def measure_one(engine: FakeEngine, windows: list[list[int]], tail: int = 0) -> FormatQuality:
    (quality,) = measure(FakeEngine(), [engine], windows, tail)
    return quality


windows_of_tokens = st.integers(2, 20).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(windows=windows_of_tokens, chunk=st.integers(1, 7), data=st.data())
def test_figures_are_those_of_one_pass_over_the_windows(
    windows: list[list[int]], chunk: int, data: st.DataObject
) -> None:
    tail = data.draw(st.integers(0, len(windows[0])))
    engine, reference = FakeEngine(noise=0.7, chunk=chunk), FakeEngine(chunk=chunk)
    (quality,) = measure(reference, [engine], windows, tail)
    p, q = (torch.cat([e.logits(w[:-1]).double().log_softmax(-1) for w in windows]) for e in (reference, engine))
    following = torch.tensor([token for w in windows for token in w[1:]])[:, None]
    nll, nll_16bit = -q.gather(1, following).mean(), -p.gather(1, following).mean()
    assert quality.perplexity.value == pytest.approx(nll.exp().item())
    assert quality.perplexity_16bit.value == pytest.approx(nll_16bit.exp().item())
    assert quality.ppl_increase.value == pytest.approx((nll - nll_16bit).exp().item() - 1)
    assert quality.kld.value == pytest.approx((p.exp() * (p - q)).sum(1).mean().item())
    assert quality.same_top.value == pytest.approx((p.argmax(1) == q.argmax(1)).double().mean().item())
    assert engine.calls == reference.calls == [(w, tail) for w in windows]


def test_an_unchanged_cache_is_exactly_unchanged() -> None:
    quality = measure_one(FakeEngine(), [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], tail=2)
    assert quality.kld.value == 0
    assert quality.ppl_increase.value == 0
    assert quality.same_top.value == 1


def test_bits_per_element_are_measured_at_the_end_of_the_window() -> None:
    quality = measure_one(FakeEngine(noise=1.0, bytes_per_token=3), [[1] * 9])
    assert quality.bits_per_element == 3
    assert quality.windows[0].usage.tokens == 9


def test_progress_adds_up_to_the_tokens_of_all_runs() -> None:
    seen: list[tuple[int, int]] = []
    engines = [FakeEngine(0.1), FakeEngine(0.2)]
    measure(FakeEngine(), engines, [[1] * 10, [2] * 10], 3, lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {3 * 20}
    assert seen[-1][0] == 3 * 20
    assert all(0 < after[0] - before[0] <= 4 for before, after in pairwise(seen))


def test_no_sequence_stays_open_after_success_or_interruption() -> None:
    engines = [FakeEngine(), FakeEngine(0.1), FakeEngine(0.2)]
    measure(engines[0], engines[1:], [[1] * 10], 2)
    assert [e.open for e in engines] == [0, 0, 0]

    def interrupt(_done: int, _total: int) -> None:
        if sum(len(e.calls) for e in engines) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(engines[0], engines[1:], [[1] * 10], 2, interrupt)
    assert [e.open for e in engines] == [0, 0, 0]


def test_logits_that_are_not_finite_are_one_clear_error() -> None:
    with pytest.raises(NumericalError, match="kv2 cache"):
        measure_one(FakeEngine(noise=math.inf), [[1, 2, 3]])


@given(
    context=st.integers(2, 12),
    count=st.integers(1, 5),
    extra=st.integers(0, 11),
    bos=st.lists(st.just(99), max_size=1),
)
def test_windows_are_consecutive_and_whole(context: int, count: int, extra: int, bos: list[int]) -> None:
    tokens = count * context + min(extra, context - 1)
    text = list(range(count * context))
    windows = cut_windows(text, context, tokens, bos)
    assert len(windows) == count
    assert all(len(w) == context and w[: len(bos)] == bos for w in windows)
    joined = [token for w in windows for token in w[len(bos) :]]
    assert joined == text[: len(joined)]


@pytest.mark.parametrize(
    ("length", "context", "tokens", "sentence"),
    [
        (100, 1, 50, "context is 1; it must be at least 2"),
        (100, 20, 10, "tokens is 10; it must be at least the context, 20"),
        (100, 20, 200, "the text has 100 tokens and 10 windows of 20 need 200"),
    ],
)
def test_windows_that_can_not_be_cut_are_one_clear_error(
    length: int, context: int, tokens: int, sentence: str
) -> None:
    with pytest.raises(ParameterError, match=sentence):
        cut_windows(list(range(length)), context, tokens)


def test_the_serving_path_of_a_real_model(tiny_model: LoadedModel) -> None:
    text = torch.randint(256, (128,), generator=torch.Generator().manual_seed(0)).tolist()

    def engine(kv: str, **options: int) -> LLM:
        return LLM(tiny_model, kv=kv, max_context=128, max_batch=1, prefill="window", chunk_size=32, **options)

    small = {"sinks": 4, "recent": 16}
    candidates = [engine("bf16"), engine("kv4", **small), engine("kv2", **small)]
    same, four, two = measure(engine("bf16"), candidates, cut_windows(text, 64, 128), decode_tail=8)
    assert same.kld.value == 0
    assert 0 < four.kld.value < two.kld.value
    # The same figures from whole-window logits, without this module's chunked reduction.
    logits = {c.kv.name: torch.cat(list(c.score(text[:64], 8)))[:-1].double() for c in candidates}
    p, q = (logits[name].log_softmax(-1) for name in ("bf16", "kv2"))
    assert two.windows[0].kld == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-6)
    usage = two.windows[0].usage
    assert usage.tokens == 64
    assert usage.held_bytes == candidates[2].layout.cache_bytes(tiny_model.geometry, 64)
    assert two.bits_per_element == 8 * usage.held_bytes / tiny_model.geometry.elements(64)
    for c in candidates:
        c.check_integrity()
