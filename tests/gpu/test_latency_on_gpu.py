"""The benchmark of decode steps on a GPU, with the first layers of two shapes: `make test-gpu`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subten.bench import model_shapes
from subten.bench.__main__ import main
from subten.bench.decoding import Decoding
from subten.bench.filled_cache import CacheKind
from subten.bench.latency import BenchModel
from subten.bench.latency_ahead import AheadTask, take_step
from subten.bench.latency_cases import LatencyCase, with_moe
from subten.bench.latency_session import load
from subten.bench.prefill import Prefilling
from subten.engine.runner import Work
from subten.engine.sampling import SamplingParams
from subten.formats import get_format

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0)
FEW = {
    name: replace(spec, feed_forwards=spec.feed_forwards[:2])
    for name, spec in model_shapes.SHAPES.items()
    if name in ("olmoe-1b-7b", "seed-32b-a7b")
}


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "SHAPES", FEW)


@pytest.mark.parametrize("shape", list(FEW))
def test_every_case_has_its_figures(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--batch", "1,4", "--context", "1k", "--steps", "300", "--no-ahead", "--largest", "--profile"]
    assert main(["latency", shape, *arguments, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert len(content["latency"]) == 12
    for row in content["latency"]:
        # Where `nvidia-smi` is not there, clocks are not known.
        assert {key for key, value in row.items() if value is None} - {"sm_mhz", "power_w"} == {"note"}
        assert row["host_ms"] > 0 < row["device_ms"]
        assert 0 < row["share"] < 1
        assert (row["compilations"], row["device_allocations"]) == (0, 0)
        assert row["profile"]["launches"] > 4
    assert all(row["batch"] for row in content["largest"])


@pytest.mark.parametrize("size", [100, 600])
@pytest.mark.parametrize("kv", ["kv2", "bf16"])
@pytest.mark.parametrize("shape", list(FEW))
def test_layers_of_a_prompt_have_the_host_wait_for_nothing(shape: str, kv: str, size: int) -> None:
    """But for the first, which works out what all of them move."""
    made = load(shape, "channel", torch.device("cuda", 0))
    model = BenchModel(with_moe(made.loaded, "fused")[0], made.weights, random=True)
    prefilling = Prefilling(model, get_format(kv), 2048)
    prefilling.take(1024, size)
    books, runner, tokens = prefilling.cache.books, prefilling.cache.runner, list(range(size))
    step = runner.begin([Work(books.append(prefilling.cache.open(1024), tokens), tokens)])
    step.advance(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.advance(step.layers_left)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(step.logits().isfinite().all())


@pytest.mark.parametrize("moe", ["fused", "unfused"])
@pytest.mark.parametrize("kv", ["kv2", "bf16"])
@pytest.mark.parametrize("shape", list(FEW))
def test_a_graph_gives_the_tokens_of_the_same_step_kernel_by_kernel(shape: str, kv: str, moe: str) -> None:
    made = load(shape, "channel", torch.device("cuda", 0))
    model = BenchModel(with_moe(made.loaded, moe)[0], made.weights, random=True)
    kind = CacheKind.of(model.loaded, get_format(kv), 1024)
    decoding = Decoding(model.loaded, kind, [4], model.calibration(get_format(kv), mean_key=True), GREEDY)
    decoding.begin(4, 20)
    decoding.steps(3)
    for _ in range(5):
        works = decoding.works()
        logits = decoding._runner.run([Work(work.plan, [work.token_id]) for work in works])
        tokens = torch.tensor(decoding.decode(works).token_ids, device=logits.device)
        short = logits.amax(1) - logits.gather(1, tokens[:, None])[:, 0]
        assert float(short.max()) < 0.05, "but for near ties"


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_what_is_compiled_ahead_can_be_launched(scales) -> None:
    case = LatencyCase("olmoe-1b-7b", "fused", get_format("kv2"), 4096, 8)
    take_step(AheadTask(case, scales, GREEDY, mean_key=True), torch.device("cuda", 0))


def test_a_stream_beside_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--prompt", "4k", "--budget", "none,5", "--json", str(path)]
    assert main(["itl", "olmoe-1b-7b", *arguments]) == 0
    assert all(row["prompt_s"] > 0 for row in json.loads(path.read_text())["itl"])
