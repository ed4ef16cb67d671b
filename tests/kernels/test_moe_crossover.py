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

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "moe_h200.json"


def shape(name: str, weights: str = "block") -> MoEShape:
    return shape_of(MoECase(name, 1, weights))


def test_one_launch_and_grouped_gemms_as_measured() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["moe"]
    full = [row for row in rows if (row["tokens"], row["kernel"]) == (MOST_TOKENS_OF_A_LAUNCH, "gluon")]
    assert {row["shape"] for row in full} == set(MODELS)
    for row in full:
        assert launch_us(shape(row["shape"])) == pytest.approx(row["us"], rel=0.05)
        restored_before = grouped_us(shape(row["shape"], "bf16"), MOST_TOKENS_OF_A_LAUNCH)
        assert restored_before == pytest.approx(row["peers"]["unfused bf16"], rel=0.06)


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
    assert moved == pytest.approx(4 * 128 * 2048 * 768 / 4.55e6)


def test_grouped_gemms_are_limited_by_products_in_the_end() -> None:
    of = shape("mix-32b-a9b")
    assert grouped_us(of, 128) == grouped_us(of, 65)
    assert grouped_us(of, 8192) - grouped_us(of, 4096) == pytest.approx(4096 * 12 * 4096 * 9728 / 600e6)


def test_launches_that_are_always_faster_have_an_end() -> None:
    assert most_tokens_in_launches(shape("olmoe-1b-7b"), replace(H200, restored=1e6)) == 4096
