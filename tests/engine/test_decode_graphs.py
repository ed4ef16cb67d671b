"""Decode steps that are recorded and replayed, on a CPU: a recorder that takes steps again stands for the graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from tests.engine.serving import reference_and_model

from subten.engine import LLM, LoadedModel, SamplingParams
from subten.engine import llm as llm_module
from subten.engine.decode_rows import NO_SLOT
from subten.engine.decode_step import CHOICES
from subten.engine.graphs import Recorded, Step, why_no_graphs
from subten.errors import KernelUnavailableError
from subten.kernels import Use, select_attention, select_kernels
from subten.kernels.launches import padded, sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9] * 9]


@dataclass
class FakeRecorder:
    """Takes the step again and leaves results where the recorded ones are, as a graph does."""

    replays: list[int] = field(default_factory=list)

    def __call__(self, step: Step) -> Recorded:
        logits, results = step()

        def replay() -> None:
            self.replays.append(len(logits))
            with torch.inference_mode():
                for kept, new in zip((logits, results), step(), strict=True):
                    kept.copy_(new)

        return Recorded(replay, logits, results)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return reference_and_model("qwen3_moe", torch.float64, num_hidden_layers=2, vocab_size=258)[1]


@pytest.fixture
def recorded(model, monkeypatch) -> Callable[..., tuple[LLM, FakeRecorder]]:
    """An engine whose steps are recorded."""
    recorder = FakeRecorder()

    def build(**options: object) -> tuple[LLM, FakeRecorder]:
        with monkeypatch.context() as patched:
            patched.setattr(llm_module, "why_no_graphs", lambda *_: None)
            patched.setattr(llm_module, "GraphRecorder", lambda device: recorder)
            return LLM(model, **{"kv": "bf16", "max_context": 160, **options}), recorder

    return build


def tokens(llm: LLM, prompts: list[list[int]], params: object) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate(prompts, params)]


def test_the_rows_of_a_graph() -> None:
    expected = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16, 17: 24, 32: 32, 33: 40}
    assert {count: padded(count) for count in expected} == expected
    assert sizes(1) == [1]
    assert sizes(5) == [1, 2, 4, 8]
    assert sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert len(sizes(32)) * len(CHOICES) == 21


@pytest.mark.parametrize("max_batch", [3, 5])
def test_recorded_steps_give_the_tokens_of_steps_that_are_not(model, recorded, max_batch) -> None:
    """Three sequences in four rows, some of which end before others."""
    llm, recorder = recorded(max_batch=max_batch)
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=5, seed=4, max_tokens=4, ignore_eos=True),
    ]
    plain = LLM(model, kv="bf16", max_context=160, max_batch=max_batch)
    assert tokens(llm, PROMPTS, params) == tokens(plain, PROMPTS, params)
    assert {4, 2, 1} == set(recorder.replays)
    assert llm.stats().graphs == len(sizes(max_batch)) * len(CHOICES)
    assert plain.stats().graphs == 0
    assert llm.stats().compilations == llm.stats().device_allocations == 0
    llm.check_integrity()


def test_recording_touches_no_page_and_no_window(recorded) -> None:
    llm, _ = recorded(max_batch=3, kv="kv2-plain")
    tokens(llm, PROMPTS, GREEDY)
    storage = llm._runner.storage
    before = [[memory.clone() for memory in storage.layer(index)] for index in range(2)]
    llm._runner.decode_step.capture(FakeRecorder(), [3])
    for index in range(2):
        for found, expected in zip(storage.layer(index), before[index], strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_rows_that_nobody_is_in_are_all_alike(recorded) -> None:
    """So that together they visit the experts of one token."""
    llm, _ = recorded(max_batch=8)
    tokens(llm, PROMPTS * 2, SamplingParams(temperature=0.9, max_tokens=5, ignore_eos=True))
    tokens(llm, PROMPTS[:1], SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True))
    rows = llm._runner.decode_step._rows
    llm._runner.decode_step.capture(FakeRecorder(), [8])
    inputs = rows.inputs(8)
    assert inputs.attention.window_slot.tolist() == [NO_SLOT] * 8
    assert inputs.token_ids.tolist() == [0] * 8


def test_a_step_that_fails_is_taken_anew_from_what_the_host_knows(recorded) -> None:
    llm, _ = recorded(max_batch=2)
    expected = tokens(llm, PROMPTS[:1], GREEDY)
    step = llm._runner.decode_step
    (kept,) = (entry for (size, choice), entry in step._recorded.items() if size == 1 and not choice.noise)
    failures = [RuntimeError("CUDA error: out of memory")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()
        kept.replay()

    step._recorded = {key: Recorded(fails_once, kept.logits, kept.results) for key in step._recorded}
    (answer,) = llm.generate(PROMPTS[:1], GREEDY)
    assert answer.finish_reason == "error"
    assert tokens(llm, PROMPTS[:1], GREEDY) == expected


# --- where there are none --------------------------------------------------------------------------------------


def obstacle(monkeypatch, *, kv: str = "bf16", experts: bool = True, **requested: str) -> str | None:
    """On a GPU of compute capability 9.0, as far as choosing goes."""
    from subten.formats import PageLayout, get_format

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    attention = select_attention(
        Use(CUDA, torch.bfloat16, (PageLayout(get_format(kv), 128),)), requested.pop("cached_attention", None)
    )
    return why_no_graphs(CUDA, select_kernels(CUDA, requested, dtype=torch.bfloat16), attention, experts)


def test_a_gpu_has_graphs_unless_a_kernel_asks_the_host(monkeypatch) -> None:
    assert obstacle(monkeypatch) is None
    assert obstacle(monkeypatch, kv="kv2", moe="unfused") is None
    assert obstacle(monkeypatch, kv="int4") == "cached_attention=torch reads back to the host"
    assert obstacle(monkeypatch, cached_attention="torch") == "cached_attention=torch reads back to the host"
    assert obstacle(monkeypatch, moe="torch") == "moe=torch reads back to the host"
    assert obstacle(monkeypatch, moe="torch", experts=False) is None
    kernels = select_kernels(CPU)
    assert why_no_graphs(CPU, kernels, select_attention(Use(CPU)), True) == "the model is on a cpu device"


def test_graphs_that_were_asked_for_are_refused_with_the_reason(model) -> None:
    with pytest.raises(KernelUnavailableError, match="can't be CUDA graphs: the model is on a cpu device"):
        LLM(model, kv="bf16", max_context=100, cuda_graphs=True)
    assert LLM(model, kv="bf16", max_context=100, cuda_graphs=False).stats().graphs == 0
