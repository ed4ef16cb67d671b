"""The whole benchmark of decode steps on a CPU, with a tiny model: what a GPU adds is graphs and events."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer

from subten.bench import latency, model_shapes
from subten.bench.__main__ import app, main
from subten.bench.decoding import Decoding
from subten.bench.filled_cache import CacheKind
from subten.bench.itl import ItlRow
from subten.bench.latency import BenchModel, LatencyBench, StepWishes
from subten.bench.latency_ahead import AheadTask, take_step
from subten.bench.latency_cases import BATCHES_TRIED, LatencyCase, step_bytes, with_moe
from subten.bench.latency_options import LatencyOptions
from subten.bench.latency_report import LargestRow, LatencyRow, percentile
from subten.bench.latency_session import ahead_tasks
from subten.bench.random_model import random_model, random_model_calibration, random_weights
from subten.bench.unfused_fp8 import moe_unfused_fp8
from subten.cli import main as subten_main
from subten.engine.sampling import SamplingParams
from subten.errors import KernelUnavailableError, StorageError
from subten.formats import get_format
from subten.kernels.attention.cost import attention_bytes
from subten.kernels.moe import MoEWeights, moe_reference
from subten.kernels.moe.packing import wide_down, wide_gate_up
from subten.models.weights import count_parameters
from support.tiny_shape import TINY

CPU = torch.device("cpu")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "SHAPES", {**model_shapes.SHAPES, "tiny": TINY})
    monkeypatch.setattr(latency, "_SIDE_STEPS", 4)
    monkeypatch.setattr(latency, "_UNTIMED", 2)
    monkeypatch.setattr(latency, "_ROUND", 16)


@pytest.fixture(scope="module")
def model() -> BenchModel:
    return BenchModel(random_model("tiny", TINY, "block", torch.float32, CPU), "fp8 block", random=True)


def decoding_of(model: BenchModel, kv: str, batches: list[int], context: int, params=GREEDY) -> Decoding:
    kind = CacheKind.of(model.loaded, get_format(kv), context)
    calibration = model.calibration(kind.layout.format, mean_key=True)
    return Decoding(model.loaded, kind, batches, calibration, params)


def case(kv: str, batch: int, moe: str = "fused", context: int = 256) -> LatencyCase:
    return LatencyCase("tiny", moe, get_format(kv), context, batch)


# --- the run -----------------------------------------------------------------------------------------------------


def test_every_case_becomes_a_row_with_all_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1,4", "--context", "256", "--kv", "kv2", "--steps", "20", "--device", "cpu"]
    assert main(["latency", "tiny", *arguments, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    rows = content["latency"]
    assert content["largest"] == []
    assert content["machine"]["device"].startswith("CPU")
    assert [(row["moe"], row["kv"], row["batch"]) for row in rows] == [
        (moe, "kv2", batch) for moe in ("unfused", "fused") for batch in (1, 4)
    ]
    for row in rows:
        nothing = {key for key, value in row.items() if value is None}
        assert nothing == {"device_ms", "sm_mhz", "power_w", "profile", "note"}
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["p99_over_p50"] == pytest.approx(row["p99_ms"] / row["p50_ms"])
        assert row["loop_p50_ms"] >= row["p50_ms"] > row["host_ms"]
        assert row["share"] == pytest.approx(row["roofline_ms"] / row["p50_ms"])
        assert 2 <= row["experts"] <= min(6, 2 * row["batch"])
        assert row["steps"] == 20
        assert (row["compilations"], row["device_allocations"]) == (0, 0)
    assert all(row["weights"] == "fp8 channel" for row in rows)
    assert "p99/p50" in capsys.readouterr().out


def test_a_step_by_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1", "--context", "256", "--kv", "bf16", "--moe", "fused", "--steps", "10", "--profile"]
    assert main(["latency", "tiny", *arguments, "--device", "cpu", "--json", str(path)]) == 0
    profile = json.loads(path.read_text())["latency"][0]["profile"]
    times = [kernel["us"] for kernel in profile["kernels"]]
    assert times == sorted(times, reverse=True)
    assert len(times) == 12
    assert sum(times) <= profile["us"]
    assert "a step as graph" in capsys.readouterr().out


def test_subten_bench_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1", "--context", "256", "--kv", "bf16", "--moe", "fused", "--steps", "10"]
    assert subten_main(["bench", "latency", "tiny", *arguments, "--device", "cpu", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["latency"]
    assert row["bits"] == 16
    assert set(row) == {field.name for field in fields(LatencyRow)}


def test_a_model_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "2", "--context", "256", "--kv", "kv2", "--moe", "fused", "--steps", "10"]
    assert main(["latency", "demo-moe", *arguments, "--device", "cpu", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["latency"]
    assert row["weights"] == "16bit"
    assert row["p50_ms"] > 0


def test_without_a_gpu_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["latency", "mix-32b-a9b"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the benchmarks measure a CUDA GPU, and torch finds none here; run them on a machine that has one"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--moe", "dense"], "--moe is 'dense'; it takes fused and unfused"),
        (["--experts", "row"], "--experts is 'row'"),
        (["--batch", "3"], "--batch has '3'; it takes the sizes that graphs are made for: 1, 2, 4, 8, 16"),
        (["--context", "100"], "--context has 100 tokens; it takes 256 or more"),
        (["--kv", "kv3"], "there is no KV format 'kv3'"),
        (["--kv", ","], "there is nothing to measure"),
        (["--temperature", "-1"], "temperature"),
        (["--steps", "3"], "Invalid value for '--steps'"),
        (["--json", "/nowhere/rows.json"], "can't be written"),
    ],
)
def test_what_can_not_be_done_is_one_line(arguments, message, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", "tiny", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_name_that_is_nothing_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", "tiny,mix-99b", "--device", "cpu"]) == 2
    assert "mix-99b" in capsys.readouterr().err


def test_a_failure_is_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    time_steps = latency.time_steps

    def fails_once(decoding, model, watched, case, steps):
        if case.batch == 2:
            raise RuntimeError("an illegal thing\nwith a trace")
        return time_steps(decoding, model, watched, case, steps)

    monkeypatch.setattr(latency, "time_steps", fails_once)
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1,2", "--context", "256", "--kv", "bf16,fp8", "--moe", "fused", "--steps", "10"]
    assert main(["latency", "tiny", *arguments, "--device", "cpu", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["latency"]
    assert [row["note"] for row in rows] == [None, "RuntimeError: an illegal thing"] * 2


def test_what_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("subten.bench.filled_cache.free_memory", lambda _: 2 * 300_000)
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1,4,8", "--context", "256,1k", "--kv", "bf16", "--moe", "fused", "--steps", "10"]
    assert main(["latency", "tiny", *arguments, "--device", "cpu", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["latency"]
    assert [row["p50_ms"] is not None for row in rows] == [True, True, False, True, False, False]
    assert "no room for a cache of" in rows[2]["note"]


def test_a_context_that_the_model_has_no_positions_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1", "--context", "2k", "--kv", "bf16", "--moe", "fused", "--steps", "10"]
    assert main(["latency", "tiny", *arguments, "--device", "cpu", "--json", str(path)]) == 1
    (row,) = json.loads(path.read_text())["latency"]
    assert row["note"] == "tiny takes 1024 tokens, not 2048"


def test_when_the_time_is_over_rows_say_so(hasty_clock: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1,2", "--context", "256", "--kv", "kv2,bf16", "--moe", "fused", "--steps", "10"]
    main(["latency", "tiny", *arguments, "--device", "cpu", "--seconds", "200", "--json", str(path)])
    rows = json.loads(path.read_text())["latency"]
    assert len(rows) == 4
    assert rows[0]["note"] is None
    assert rows[-1]["note"] == "the time was over"


def test_a_device_that_stopped_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(self, cases, take):
        raise KernelUnavailableError("the device stopped working")

    monkeypatch.setattr(LatencyBench, "measure", stopped)
    path = tmp_path / "rows.json"
    assert main(["latency", "tiny", "--device", "cpu", "--context", "256", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["latency"]
    assert [row["note"] for row in rows] == ["the device stopped working"] * 30


# --- going on with a file ------------------------------------------------------------------------------------------

FOUR = [
    "--batch",
    "1,2",
    "--context",
    "256",
    "--kv",
    "bf16,fp8",
    "--moe",
    "fused",
    "--steps",
    "10",
    "--device",
    "cpu",
]


def test_a_run_goes_on_where_it_was_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, time_steps, measured = tmp_path / "rows.json", latency.time_steps, []

    def noted(decoding, model, watched, case, steps):
        measured.append((case.kv.name, case.batch))
        if len(measured) == 2:
            raise RuntimeError("once")
        return time_steps(decoding, model, watched, case, steps)

    monkeypatch.setattr(latency, "time_steps", noted)
    arguments = ["latency", "tiny", *FOUR, "--commit", "abc", "--json", str(path)]
    assert main(arguments) == 1
    first = json.loads(path.read_text())
    assert main([*arguments, "--resume"]) == 0
    assert measured == [("bf16", 1), ("bf16", 2), ("fp8", 1), ("fp8", 2), ("bf16", 2)]
    second = json.loads(path.read_text())
    assert [row["p50_ms"] is not None for row in second["latency"]] == [True] * 4
    assert [row for row in second["latency"] if (row["kv"], row["batch"]) != ("bf16", 2)] == [
        row for row in first["latency"] if row["p50_ms"]
    ]
    assert second["machine"] == first["machine"], "all shares are of one rate"
    assert main([*arguments, "--resume", "--steps", "12"]) == 0
    assert len(measured) == 9
    assert {row["steps"] for row in json.loads(path.read_text())["latency"]} == {12}


def test_going_on_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a figure that can't be had again, nor one that was not asked for this time."""
    path = tmp_path / "rows.json"
    arguments = ["latency", "tiny", *FOUR, "--commit", "abc", "--json", str(path)]
    assert main(arguments) == 0
    before = json.loads(path.read_text())["latency"]

    for reason in ("no more", "nor now"):

        def fails(*_, reason: str = reason):
            raise RuntimeError(reason)

        monkeypatch.setattr(latency, "time_steps", fails)
        assert main([*arguments, "--resume", "--kv", "bf16,kv2", "--steps", "20"]) == 1
        after = json.loads(path.read_text())["latency"]
        assert after[:4] == before
        assert [(row["kv"], row["note"]) for row in after[4:]] == [("kv2", f"RuntimeError: {reason}")] * 2


def test_going_on_looks_for_the_largest_batch_that_was_not_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["latency", "tiny", "--batch", "1", *FOUR[2:4], "--kv", "bf16", *FOUR[6:], "--commit", "abc"]
    arguments += ["--json", str(path)]
    assert main(arguments) == 0
    assert main([*arguments, "--resume", "--largest", "--limit", "0.001"]) == 0
    content = json.loads(path.read_text())
    assert len(content["latency"]) == 1
    assert [(row["batch"], row["next_batch"]) for row in content["largest"]] == [(None, 1)]


def test_a_profile_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["latency", "tiny", "--batch", "1", *FOUR[2:4], "--kv", "bf16", *FOUR[6:], "--profile"]
    arguments += ["--commit", "abc", "--json", str(path)]
    assert main(arguments) == 0
    content = json.loads(path.read_text())
    assert main([*arguments, "--resume", "--kv", "bf16,fp8"]) == 0
    assert json.loads(path.read_text())["latency"][0] == content["latency"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("no json", "is no file of decode steps"),
        ('{"machine": {}, "latency": [], "largest": []}', "is no file of decode steps"),
        ('{"latency": 3}', "is no file of decode steps"),
    ],
)
def test_what_there_is_nothing_to_go_on_with(content, message, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    assert main(["latency", "tiny", *FOUR, "--resume", "--json", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert (path.read_text() if path.exists() else None) == content


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path, capsys) -> None:
    assert main(["latency", "tiny", *FOUR, "--resume"]) == 2
    assert "--resume goes on with a file; name it with --json" in capsys.readouterr().err
    path = tmp_path / "rows.json"
    arguments = ["latency", "tiny", *FOUR, "--json", str(path)]
    assert main([*arguments, "--commit", "abc"]) == 0
    before = path.read_bytes()
    assert main([*arguments, "--commit", "def", "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.strip().endswith("the file's commit is abc, and this is def; measure into another file")
    assert path.read_bytes() == before


# --- what is measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "kv2"])
def test_books_hold_what_is_read(model: BenchModel, kv: str) -> None:
    decoding = decoding_of(model, kv, [1, 2, 4], 512)
    for batch in (4, 1, 2):
        decoding.begin(batch, 20)
        assert decoding.lengths == tuple(512 - 20 - row * 64 // batch for row in range(batch))
        decoding.steps(20)
        assert decoding.lengths[0] == 512
        decoding._books.check_integrity()
    assert decoding._books.pages.count == 4 * decoding.layout.pages_for(512)


def test_a_step_is_the_runners(model: BenchModel) -> None:
    """What is timed gives the tokens that a pass of the runner gives over the same cache."""
    decoding = decoding_of(model, "kv2", [4], 512)
    decoding.begin(4, 30)
    decoding.steps(3)
    works = decoding.works()
    from subten.engine.runner import Work

    logits = decoding._runner.run([Work(work.plan, [work.token_id]) for work in works])
    assert decoding.decode(works).token_ids == logits.argmax(-1).tolist()
    assert len(set(decoding._tokens)) > 1


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8), SamplingParams(temperature=1, top_k=3)])
def test_only_steps_that_are_measured_are_captured(model: BenchModel, params: SamplingParams) -> None:
    decoding = decoding_of(model, "bf16", [1, 3, 4], 256, params)
    step = decoding._runner.decode_step
    assert {size for size, _ in step._recorded} == {1, 4}
    assert step.graphs == 2
    decoding.begin(3, 10)
    step._take = None
    decoding.steps(1)
    with pytest.raises(AssertionError, match="was not captured"):
        decoding.begin(2, 10)


def test_graphs_that_do_nothing_leave_the_host_its_work(model: BenchModel) -> None:
    decoding = decoding_of(model, "bf16", [2], 512)
    decoding.begin(2, 30)
    decoding.steps(4)
    tokens = decoding._tokens
    decoding.instruments.without_graphs(lambda: decoding.steps(10))
    assert decoding._tokens == tokens
    assert decoding.instruments.device_ms(lambda: decoding.steps(2)) == []


def test_sampled_steps(model: BenchModel) -> None:
    decoding = decoding_of(model, "bf16", [2], 512, SamplingParams(temperature=0.8, top_p=0.9))
    decoding.begin(2, 30)
    decoding.steps(4)


def test_hidden_states_that_are_not_finite_have_no_figure(model: BenchModel) -> None:
    layer = model.loaded.decoder.weights.layers[0]
    broken = replace(layer, input_norm=torch.full_like(layer.input_norm, torch.nan))
    weights = replace(model.loaded.decoder.weights, layers=(broken, broken))
    decoder = type(model.loaded.decoder)(TINY, weights, model.loaded.kernels)
    damaged = BenchModel(replace(model.loaded, decoder=decoder), "fp8 block", random=True)
    rows: list[LatencyRow] = []
    bench = LatencyBench(MACHINE, damaged, "fused", StepWishes(10, GREEDY), lambda: False)
    bench.measure([case("bf16", 1)], rows.append)
    assert rows[0].note == "the logits of these weights are not finite"
    assert rows[0].p50_ms is None


def test_rows_that_can_not_be_taken_are_no_rows_without_a_figure(model: BenchModel) -> None:
    def refuse(row: LatencyRow) -> None:
        raise StorageError("no room for rows")

    bench = LatencyBench(MACHINE, model, "fused", StepWishes(10, GREEDY), lambda: True)
    with pytest.raises(StorageError, match="no room for rows"):
        bench.measure([case("bf16", 1)], refuse)


MACHINE = latency.Machine("a CPU", "", 1, 0, 1, None, None, None, "2", None, "3", "0", None, 0.01)


def test_the_bytes_of_a_step(model: BenchModel) -> None:
    loaded, layout = model.loaded, CacheKind.of(model.loaded, get_format("kv2"), 512).layout
    hidden, width, shared = 64, 48, 32
    linear = (4 + 2 * 2) * 32 * (hidden + 4) + hidden * (4 * 32 + 4)
    bias = (4 + 2 * 2) * 32 * 4
    router = 6 * hidden * 4 + hidden * 4
    norms = 2 * hidden * 4
    expert = 3 * hidden * width + 4 * (2 + 1)
    of_all = 3 * hidden * shared + 4 * (2 + 1)
    output = 320 * (hidden + 4) + hidden * 4
    cache = 2 * sum(attention_bytes(layout, 1, 2, 2, length) for length in (500, 300))
    fixed = 2 * (linear + bias + router + norms + of_all) + output + 2 * hidden * 4 + cache
    assert step_bytes(loaded, layout, [500, 300], [3, 2]) == fixed + 5 * expert
    assert step_bytes(loaded, layout, [500, 300], [6, 6]) == fixed + 12 * expert


def test_experts_that_tokens_visit_are_counted(model: BenchModel) -> None:
    variant, watched = with_moe(model.loaded, "unfused")
    weights = variant.decoder.weights.layers[0].feed_forward
    x = torch.randn(1, 64)
    watched(x, weights)
    assert watched.visited == []
    watched.watching = True
    torch.testing.assert_close(watched(x, weights), moe_reference(x, weights), atol=1e-4, rtol=1e-4)
    watched(torch.randn(200, 64), weights)
    assert watched.visited == [2, 6]


def largest(
    model: BenchModel, monkeypatch, ms_per_sequence: float, most: int = 64, seconds=lambda: False
) -> LargestRow:
    tried: list[int] = []

    def timed_loop(decoding, context, batch, steps):
        tried.append(batch)
        return [ms_per_sequence * batch / 1000] * steps, []

    monkeypatch.setattr(latency, "timed_loop", timed_loop)
    bench = LatencyBench(MACHINE, model, "fused", StepWishes(10, GREEDY, largest_ms=10.0), seconds)
    row = bench._largest(case("bf16", 1), 10.0, most, {}, None)
    assert len(tried) <= 4
    return row


def test_the_largest_batch_is_found_by_bisection(model: BenchModel, monkeypatch) -> None:
    row = largest(model, monkeypatch, 0.3)
    assert (row.batch, row.next_batch, row.note) == (32, 40, None)
    assert (row.p99_ms, row.next_p99_ms) == (pytest.approx(9.6), pytest.approx(12))
    row = largest(model, monkeypatch, 11)
    assert (row.batch, row.next_batch, row.note) == (None, 1, None)
    row = largest(model, monkeypatch, 0.1)
    assert (row.batch, row.next_batch, row.note) == (64, None, "no larger batch was tried")
    row = largest(model, monkeypatch, 0.1, most=24)
    assert (row.batch, row.next_batch, row.note) == (24, None, "the device's memory has no room for more")
    row = largest(model, monkeypatch, 0.1, seconds=lambda: True)
    assert (row.batch, row.note) == (None, "the time was over")


def test_percentiles_are_samples() -> None:
    assert percentile(range(1, 101), 50) == 50
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 501), 99) == 495
    assert percentile([3.0], 99) == 3.0


# --- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mix-32b-a9b", 32_207_278_080, 9_256_046_592),
        ("seed-32b-a7b", 32_006_082_560, 6_991_253_504),
        # As their publishers count them.
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_shapes_have_the_parameters_of_their_names(name: str, total: int, active: int) -> None:
    counted = count_parameters(model_shapes.SHAPES[name])
    assert (counted.total, counted.active) == (total, active)


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_random_weights_give_numbers_around_one(scales) -> None:
    weights = random_weights(TINY, scales, torch.float32, CPU, seed=1)
    layer = weights.layers[1]
    moe = layer.feed_forward
    assert isinstance(moe, MoEWeights)
    for wide in (
        layer.attention.o.wide(torch.float32),
        wide_gate_up(moe.experts, slice(0, 6), torch.float32),
        wide_down(moe.experts, slice(0, 6), torch.float32),
        moe.router,
    ):
        assert float(wide.std()) == pytest.approx(wide.shape[-1] ** -0.5, rel=0.2)
    assert float(layer.input_norm.min()) == float(layer.input_norm.max()) == 1
    assert float(weights.embedding.std()) == pytest.approx(1, rel=0.05)
    again = random_weights(TINY, scales, torch.float32, CPU, seed=1)
    assert torch.equal(again.layers[1].feed_forward.router, moe.router)


@pytest.mark.parametrize("mean_key", [True, False])
def test_a_random_calibration_codes_all_layers_alike(model: BenchModel, mean_key: bool) -> None:
    fmt = get_format("kv2")
    calibration = random_model_calibration(fmt, model.loaded, mean_key=mean_key)
    assert calibration.coding(0, fmt, model.loaded) is calibration.coding(1, fmt, model.loaded)
    assert (calibration.removed_mean(1, fmt) is not None) == mean_key


def test_the_unfused_pipeline_in_fp8(model: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's grouped GEMM, which is not there on a CPU, in plain torch."""

    def grouped(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        out = torch.empty(len(a), b.shape[-1], dtype=out_dtype)
        for one, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
            product = a[start:end].float() @ b[one].float()
            out[start:end] = (product * scale_a[start:end, None] * scale_b[one]).to(out_dtype)
        return out

    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped)
    weights = random_weights(TINY, "channel", torch.float32, CPU).layers[0].feed_forward
    x = torch.randn(7, 64)
    found, expected = moe_unfused_fp8(x, weights), moe_reference(x, weights)
    assert float((found - expected).norm() / expected.norm()) < 0.06
    with pytest.raises(KernelUnavailableError, match="a scale per output channel"):
        moe_unfused_fp8(x, random_weights(TINY, "block", torch.float32, CPU).layers[0].feed_forward)


# --- compiling ahead -----------------------------------------------------------------------------------------------


def options(**changes) -> LatencyOptions:
    asked = {
        "batch": "1,4",
        "context": "256",
        "kv": "kv2",
        "moe": "fused,unfused",
        "steps": 10,
        "largest": None,
        "experts": "channel",
        "temperature": 0.0,
        "top_p": 1.0,
        "mean_key": False,
        "profile": False,
        "device": "cpu",
        "seconds": None,
        "ahead": True,
        "resume": False,
    }
    return LatencyOptions.parse("tiny,demo-moe", **asked | changes)


def test_what_is_compiled_ahead() -> None:
    """All that graphs are made for; of a model by name nothing."""

    def batches(asked: LatencyOptions) -> list[tuple[str, str, int]]:
        return [(task.case.shape, task.case.moe, task.case.batch) for task in ahead_tasks(asked.cases, asked)]

    asked = options()
    assert batches(asked) == [("tiny", "fused", batch) for batch in sorted({c.batch for c in asked.cases})]
    assert batches(options(largest=10.0)) == [("tiny", "fused", batch) for batch in BATCHES_TRIED]


@pytest.mark.parametrize("kv", ["kv2", "bf16"])
def test_a_step_that_is_compiled_ahead_can_be_taken(kv: str) -> None:
    take_step(AheadTask(case(kv, 4, context=1024), "block", GREEDY, mean_key=True), CPU)


# --- documentation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["latency", "itl", "report"])
def test_every_option_is_documented(name: str) -> None:
    command = typer.main.get_command(app).commands[name]
    named = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")} - {"--help"}
    assert named
    assert all(f"`{option}" in DOCUMENT for option in named)


def test_every_key_is_documented() -> None:
    assert all(f"`{field.name}`" in DOCUMENT for kind in (LatencyRow, LargestRow, ItlRow) for field in fields(kind))
    assert all(f"`{name}`" in DOCUMENT for name in model_shapes.SHAPES if name != "tiny")
