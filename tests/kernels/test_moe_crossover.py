"""The model that decides which way prompts take, against what it was made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from subten.bench.moe import shape_of
from subten.bench.moe_cases import MODELS, MoECase
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.moe.crossover import H200, grouped_us, launch_us, most_tokens_in_launches
from subten.kernels.moe.plan import MoEShape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "moe_prompts_h200.json"


def shape(name: str, weights: str = "block") -> MoEShape:
    return shape_of(MoECase(name, 1, weights))


def measured(name: str) -> dict[int, tuple[float, float]]:
    """Microseconds in launches and by grouped GEMMs, by the number of tokens."""
    rows = [row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["moe"] if row["shape"] == name]
    us = {(row["tokens"], row["kernel"]): row["us"] for row in rows if row["weights"] == "block"}
    return {tokens: (us[tokens, "gluon"], us[tokens, "unfused"]) for tokens, _ in us}


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_as_measured(name: str) -> None:
    of = shape(name)
    for tokens, (launches, grouped) in measured(name).items():
        if tokens <= 512:
            assert launch_us(of) * tokens / MOST_TOKENS_OF_A_LAUNCH == pytest.approx(launches, rel=0.07)
            assert grouped_us(of, tokens) == pytest.approx(grouped, rel=0.15)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_chosen_was_the_faster_way_or_one_percent_behind_it(name: str) -> None:
    found = measured(name)
    assert {128, 256, 384, 512, 1024, 4096} <= set(found)
    for tokens, (launches, grouped) in found.items():
        chosen = launches if tokens <= most_tokens_in_launches(shape(name)) else grouped
        assert chosen <= 1.01 * min(launches, grouped)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_where_one_launch_more_would_take_longer(name: str) -> None:
    of = shape(name)
    launches, rest = divmod(most_tokens_in_launches(of), MOST_TOKENS_OF_A_LAUNCH)
    assert rest == 0
    assert launches * launch_us(of) <= grouped_us(of, launches * MOST_TOKENS_OF_A_LAUNCH)
    assert (launches + 1) * launch_us(of) > grouped_us(of, (launches + 1) * MOST_TOKENS_OF_A_LAUNCH)


@pytest.mark.parametrize("name", MODELS)
def test_the_dearer_restoring_the_later(name: str) -> None:
    found = [most_tokens_in_launches(shape(name), replace(H200, restored=cost)) for cost in (0, 3, 7, 20)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[2] < found[3]
    assert most_tokens_in_launches(shape(name, "bf16")) == MOST_TOKENS_OF_A_LAUNCH


def test_down_projections_in_16_bit_are_put_together_where_they_are_cut() -> None:
    of = shape("qwen3-30b-a3b", "bf16")
    moved = grouped_us(replace(of, cut=64), 65) - grouped_us(of, 65)
    assert moved == pytest.approx(4 * 128 * 2048 * 768 / H200.read)


def test_launches_that_are_always_faster_have_an_end() -> None:
    assert most_tokens_in_launches(shape("olmoe-1b-7b"), replace(H200, restored=1e6)) == 4096
