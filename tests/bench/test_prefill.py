from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from subten.bench import model_shapes, prefill
from subten.bench.__main__ import main
from subten.bench.latency import BenchModel
from subten.bench.latency_cases import with_moe
from subten.bench.machine import product_rate
from subten.bench.prefill import Prefilling, chunk_flops
from subten.bench.random_model import random_model
from subten.engine.runner import Work
from subten.formats import get_format
from support.tiny_shape import TINY

CPU = torch.device("cpu")
SMALL = ["--chunk-size", "32,128", "--context", "0,256", "--chunks", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "SHAPES", {"tiny": TINY})


def model() -> BenchModel:
    return BenchModel(random_model("tiny", TINY, "channel", torch.float32, CPU), "fp8 channel", random=True)


def test_every_chunk_becomes_a_row_with_all_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["prefill", "tiny", *SMALL, "--kv", "kv2,bf16", "--profile", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    rows = content["prefill"]
    assert content["machine"]["device"].startswith("CPU")
    assert [(row["kv"], row["context"], row["chunk_size"]) for row in rows] == [
        (kv, context, size) for kv in ("kv2", "bf16") for context in (0, 256) for size in (32, 128)
    ]
    for row in rows:
        assert {key for key, value in row.items() if value is None} == {"note"}
        assert 0 < row["p50_ms"] <= row["max_ms"]
        assert 0 < row["host_ms"] <= row["p50_ms"]
        assert row["tokens_per_s"] == pytest.approx(1000 * row["chunk_size"] / row["p50_ms"])
        assert row["tflop_per_s"] == pytest.approx(row["flops"] / row["p50_ms"] / 1e9)
        products = row["flops"] / row["product_tflop_per_s"] / 1e9
        reading = row["bytes"] / content["machine"]["read_tb_per_s"] / 1e9
        assert row["floor_ms"] == pytest.approx(max(products, reading))
        assert row["share"] == pytest.approx(row["floor_ms"] / row["p50_ms"])
        assert row["chunks"] == 3
        assert row["profile"]["of"] == "eager"
    out = capsys.readouterr().out
    assert "32 behind     0 p50" in out
    assert "a step as eager" in out


def test_a_chunk_is_the_runners_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilling = Prefilling(model(), get_format("kv2"), 512)
    taken: list[Work] = []
    run = prefilling.cache.runner.run
    monkeypatch.setattr(prefilling.cache.runner, "run", lambda works: taken.extend(works) or run(works))
    for context, size in ((0, 100), (384, 128), (500, 12)):
        seconds, launched = prefilling.take(context, size)
        assert 0 < launched <= seconds
        assert (taken[-1].plan.context_len, len(taken[-1].token_ids)) == (context, size)
        prefilling.cache.books.check_integrity()
        assert prefilling.cache.books.lengths() == ()


def test_experts_that_a_chunk_visits_are_part_of_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--chunk-size", "1,128", "--context", "0", "--chunks", "3", "--device", "cpu", "--kv", "bf16"]
    assert main(["prefill", "tiny", *arguments, "--json", str(path)]) == 0
    one, many = json.loads(path.read_text())["prefill"]
    cache = 127 * 2 * 2 * 2 * 32 * 2  # tokens, layers, sides, KV heads, channels, bytes
    experts = 4 * 2 * (3 * 64 * 48 + 4 * (2 * 48 + 64))  # of six all but two, in both layers: codes and scales
    queries = one["bytes"] + cache + experts - many["bytes"]
    assert abs(queries) <= 64, "but for a longer block table"


def test_operations_of_a_chunk() -> None:
    """Counted by hand: linear layers and experts by their weights, attention by pairs of tokens."""
    attention = 64 * 32 * (4 + 2 + 2) + 4 * 32 * 64
    experts = 6 * 64 + 2 * 3 * 64 * 48 + 3 * 64 * 32 + 64  # the last is the shared expert's gate
    linear = 2 * 2 * (attention + experts)
    scores = 2 * 64 * 320
    pairs = 4 * 4 * 32 * 2
    assert chunk_flops(TINY, 0, 1) == linear + scores + pairs
    assert chunk_flops(TINY, 100, 3) == 3 * linear + scores + pairs * (101 + 102 + 103)


def test_a_rate_of_products() -> None:
    assert 1e-4 < product_rate(CPU) < 100


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_what_is_too_long_is_a_row_and_the_others_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--chunk-size", "32,128", "--context", "960", "--chunks", "3", "--device", "cpu"]
    assert main(["prefill", "tiny", *arguments, "--json", str(path)]) == 1
    rows = {row["chunk_size"]: row for row in json.loads(path.read_text())["prefill"]}
    assert rows[128]["note"] == "tiny takes 1024 tokens, not 1088"
    assert rows[32]["p50_ms"] > 0
    assert main(["prefill", "tiny", "--chunk-size", "2048", "--device", "cpu", "--json", str(path)]) == 1
    assert {row["note"] for row in json.loads(path.read_text())["prefill"]} == {
        f"tiny takes 1024 tokens, not {n}" for n in (2048, 8192 + 2048, 32768 + 2048)
    }


def test_a_failure_is_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take = Prefilling.take

    def fails(self, context, size):
        if (context, size) == (0, 128):
            raise RuntimeError("an illegal thing\nwith a trace")
        return take(self, context, size)

    monkeypatch.setattr(Prefilling, "take", fails)
    path = tmp_path / "rows.json"
    assert main(["prefill", "tiny", *SMALL, "--json", str(path)]) == 1
    notes = [row["note"] for row in json.loads(path.read_text())["prefill"]]
    assert notes == [None, "an illegal thing", None, None]


def test_no_memory_is_a_reason_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(prefill, "FilledCache", full)
    path = tmp_path / "rows.json"
    assert main(["prefill", "tiny", *SMALL, "--json", str(path)]) == 1
    assert [row["note"] for row in json.loads(path.read_text())["prefill"]] == ["no memory"] * 4


def test_when_the_time_is_over_rows_say_so(hasty_clock: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    main(["prefill", "tiny", *SMALL, "--seconds", "150", "--json", str(path)])
    rows = json.loads(path.read_text())["prefill"]
    assert rows[0]["note"] is None
    assert rows[-1]["note"] == "the time was over"


def test_weights_that_are_not_finite_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    with torch.inference_mode():
        made.loaded.decoder.weights.final_norm.fill_(torch.nan)
    prefilling = Prefilling(BenchModel(with_moe(made.loaded, "fused")[0], "", random=True), get_format("bf16"), 64)
    with pytest.raises(prefill.NumericalError, match="not finite"):
        prefilling.take(0, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk-size", "0"], "--chunk-size has '0'; it takes numbers from 1 to 8192"),
        (["--chunk-size", "1k"], "--chunk-size has '1k'"),
        (["--context", "-1"], "'-1' is no context"),
        (["--context", ""], "there is nothing to measure"),
        (["--kv", "kv3"], "there is no KV format 'kv3'"),
        (["--chunks", "2"], "--chunks"),
        (["--json", "/nowhere/rows.json"], "can't be written"),
    ],
)
def test_what_makes_no_sense(arguments, message, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "tiny", *SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
