from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subten.cli import threads
from subten.cli.threads import suit_threads
from subten.engine import load_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch is asked for; the environment asks for nothing."""
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return counts


def test_a_small_model_is_computed_by_one_thread(asked: list[int]) -> None:
    suit_threads(load_model("demo-moe", device="cpu"))
    assert asked == [1]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_holds(asked: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    suit_threads(load_model("demo-moe", device="cpu"))
    assert asked == []


def test_a_large_model_and_one_on_a_gpu_are_left_alone(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("demo-moe", device="cpu")
    suit_threads(replace(model, device=torch.device("cuda")))
    monkeypatch.setattr(threads, "SMALL", 1 << 20)
    suit_threads(model)
    assert asked == []
