from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_bench_report import ROW

from subten.bench.__main__ import main
from subten.bench.article import PICTURES, drawn_moe, render
from subten.bench.itl import ItlRow
from subten.bench.latency_report import KernelTime, LargestRow, LatencyRow, Profile
from subten.bench.moe_report import MoERow
from subten.bench.plots import pictures
from subten.bench.prefill_report import PrefillRow
from subten.bench.published import Published
from subten.bench.publishing import BEGIN, END, publish, with_results
from subten.bench.recording import rows_json
from subten.errors import StorageError

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks"


def step(batch: int, kv: str, moe: str, p50: float, **changes) -> LatencyRow:
    figures = {
        "shape": "seed-32b-a7b",
        "context": 32768,
        "p50_ms": p50,
        "p99_ms": 1.02 * p50,
        "p99_over_p50": 1.02,
        "share": 0.5,
        "cache_gb": 0.75 * batch,
        "bits": {"kv2": 2.34, "bf16": 16.0}[kv],
        "host_ms": 0.1,
    }
    return LatencyRow(batch=batch, kv=kv, moe=moe, **figures | changes)


STEPS = [
    *(step(batch, "kv2", "fused", 2 + batch / 8) for batch in (1, 8, 32)),
    step(1, "bf16", "unfused", 6.0),
    step(8, "bf16", "unfused", 11.0),
    step(32, "bf16", "unfused", 0, p50_ms=None, p99_ms=None, note="no room for it"),
    step(1, "kv2", "fused", 2.0, context=2048),
]
LARGEST = [
    LargestRow("seed-32b-a7b", 32768, "kv2", "fused", 10.0, 56, 9.5, 64, 10.2, None),
    LargestRow("seed-32b-a7b", 32768, "bf16", "unfused", 10.0, None, None, 1, 12.0, None),
]
MOE = MoERow(
    "olmoe-1b-7b", 4, "channel", "triton", "16bit", "fixed", 24.5, 20.0, 19.0, 21.0, 10**8, 15.0, 0.75, 1e-3,
    "unfused bf16", 60.0, 3.0, {"unfused bf16": 60.0, "theirs": 66.0}, None,
)  # fmt: skip


PREFILL = PrefillRow(
    "olmoe-1b-7b", "kv2", 32768, 1024, "gluon", "fp8 channel", 10, 80.0, 81.5, 40.25, 12800.0, 10**12, 10**10, 125.0,
    700.0, 20.0, 0.25,
)  # fmt: skip
ITL = ItlRow("olmoe-1b-7b", "kv2", 131072, 256, 1, 20.0, 2.0, 2.1, 4000, 18.5, 19.9, 25.0, 0.995, 70.0)


@pytest.fixture
def results(tmp_path: Path, machine) -> Path:
    (tmp_path / "latency_h200.json").write_bytes(rows_json(machine, latency=STEPS, largest=LARGEST))
    (tmp_path / "prefill_h200.json").write_bytes(
        rows_json(machine, prefill=[PREFILL, PrefillRow("olmoe-1b-7b", "kv2", 0, 1024, note="no")])
    )
    (tmp_path / "itl_h200.json").write_bytes(rows_json(machine, itl=[ITL]))
    (tmp_path / "moe_h200.json").write_bytes(rows_json(machine, moe=[MOE]))
    (tmp_path / "attention_h200.json").write_bytes(rows_json(machine, attention=[replace(ROW, mean_key=False)]))
    return tmp_path


# --- what is committed -------------------------------------------------------------------------------------------


def test_the_document_has_what_was_measured_and_nothing_else() -> None:
    document = DOCS / "README.md"
    assert with_results(document, render(Published.read(RESULTS))) == document.read_text(encoding="utf-8")


def test_every_picture_of_the_document_is_there() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in DOCS.glob("*.png")} == {name for name in PICTURES if f"]({name})" in text}
    assert pictures(Published.read(RESULTS)).keys() == {path.name for path in DOCS.glob("*.png")}


# --- tables --------------------------------------------------------------------------------------------------------


def test_the_table(results: Path) -> None:
    text = render(Published.read(results))
    head = (
        "| shape | KV | MoE | p50 ms | p99 ms | p99/p50 | of reading | cache GB | bits | largest batch below 10 ms |"
    )
    assert head in text
    lines = [line for line in text.splitlines() if line.startswith("| seed-32b-a7b |")]
    assert lines == [
        "| seed-32b-a7b | bf16 | unfused | 6.00 | 6.12 | 1.020 | 50% | 0.75 | 16.00 | none |",
        "| seed-32b-a7b | kv2 | fused | 2.12 | 2.17 | 1.020 | 50% | 0.75 | 2.34 | 56 |",
    ]
    assert "| 32k | bf16 | unfused | 6.00 / 6.12 | 11.00 / 11.22 |  | 0.10 |" in text
    assert "| 2k | kv2 | fused | 2.00 / 2.04 |  |  | 0.10 |" in text
    assert "- `seed-32b-a7b`, 32k, bf16, batch 32: no room for it" in text


@pytest.mark.parametrize(
    ("p99", "expected"),
    [
        ({1: 3.0, 8: 9.0, 16: 12.0}, "8"),
        ({1: 3.0, 8: 9.0, 32: 12.0}, "8 to 24"),
        ({1: 3.0, 8: 9.0}, "≥ 8"),
        ({1: 3.0, 4: 10.5, 8: 9.5}, "1 to 2"),
        ({1: 11.0, 4: 9.0}, "none"),
        ({1: 11.0, 4: 12.0}, "none"),
    ],
)
def test_the_largest_batch_of_those_that_were_measured(tmp_path: Path, machine, p99, expected) -> None:
    steps = [step(batch, "kv2", "fused", ms / 1.02, p99_ms=ms) for batch, ms in p99.items()]
    (tmp_path / "latency_h200.json").write_bytes(rows_json(machine, latency=steps, largest=[]))
    (line,) = (line for line in render(Published.read(tmp_path)).splitlines() if line.startswith("| seed-32b-a7b |"))
    assert line.endswith(f" | {expected} |")


def test_the_claims_beside_what_was_measured(results: Path) -> None:
    text = render(Published.read(results))
    assert "`kv2` takes 2.34 bits per element at 32k, windows and all: 85% less than 16 bit" in text
    assert "take 256 GiB in 16 bit" in text
    assert "7B active: kv2, fused | p50 2.12 ms, p99 2.17 ms at batch 1 |" in text
    assert "| the same, by batch: `seed-32b-a7b`, fused, 32k | up to batch 56 over kv2 |" in text
    assert "p99/p50 of fused steps over `kv2` is 1.020 at 2k, 1.020 at 32k, all batches |" in text


def test_prompts(results: Path) -> None:
    text = render(Published.read(results))
    lines = [line for line in text.splitlines() if line.startswith("| olmoe-1b-7b | kv2 | 32k | 1024 |")]
    assert lines == ["| olmoe-1b-7b | kv2 | 32k | 1024 | 80.0 | 81.5 | 40.2 | 12800 | 125 | 20.0 | 25% |"]
    assert "| olmoe-1b-7b | kv2 | 0 |" not in text
    assert "prefill_h200.json" in text


def test_kernels(results: Path) -> None:
    text = render(Published.read(results))
    assert (
        "| olmoe-1b-7b | channel | triton | 16bit | fixed | 4 | 20.0 | 15.0 | 75% | 60.0 | unfused bf16 | 3.00 |"
        in text
    )
    assert "### Where the time of a step goes" not in text


def test_ways_of_a_prompt(results: Path, machine) -> None:
    peers = {"unfused bf16": 70.0, "unfused fp8": 80.0}
    prompt = replace(MOE, tokens=256, us=90.0, peers=peers)
    rows = [
        prompt,
        replace(prompt, kernel="unfused", sums="float", us=95.4),
        replace(prompt, tokens=512, us=180.0, peers={}),
        replace(prompt, tokens=512, kernel="unfused", sums="float", us=None),
    ]
    (results / "moe_prompts_h200.json").write_bytes(rows_json(machine, moe=rows))
    found = Published.read(results)
    text = render(found)
    ways = "triton 16bit fixed | unfused 16bit float | (unfused bf16) | (unfused fp8)"
    assert f"| shape | weights | tokens | {ways} |" in text
    assert "| olmoe-1b-7b | channel | 256 | 90 | 95 | 70 | 80 |" in text
    assert "| olmoe-1b-7b | channel | 512 | 180 |  |  |  |" in text
    assert [row["tokens"] for row in drawn_moe(found.moe)] == [4]
    (results / "moe_h200.json").unlink()
    alone = render(Published.read(results))
    assert "### Mixtures of experts" in alone
    assert "moe.png" not in alone


def test_a_prompt_beside_a_stream(results: Path) -> None:
    line = "128k in chunks of 256 | 20 | 2.00 / 2.10 | 18.50 / 19.90 | 25.00 | 99.5% | 70.0 |"
    assert f"| olmoe-1b-7b | kv2 | {line}" in render(Published.read(results))


def test_a_step_by_kernels(tmp_path: Path, machine) -> None:
    kernels = [KernelTime("moe_kernel", 32.0, 1500.0), KernelTime("attend", 32.0, 500.0)]
    row = step(1, "kv2", "fused", 2.0, profile=Profile("graph", 64.0, 2000.0, kernels))
    (tmp_path / "latency_h200.json").write_bytes(rows_json(machine, latency=[row], largest=[]))
    text = render(Published.read(tmp_path))
    assert "`seed-32b-a7b`, batch 1, 32k, kv2, fused: 2000 us in 64 launches" in text
    assert "| `moe_kernel` | 1500 | 32 | 75% |" in text


def test_what_was_not_measured_has_no_section(tmp_path: Path, machine) -> None:
    assert render(Published.read(tmp_path)) == ""
    assert pictures(Published.read(tmp_path)) == {}
    (tmp_path / "moe_h200.json").write_bytes(rows_json(machine, moe=[MOE]))
    text = render(Published.read(tmp_path))
    assert [line for line in text.splitlines() if line.startswith("#")] == ["## Results", "### Mixtures of experts"]


def test_runs_of_several_files_are_one(tmp_path: Path, machine) -> None:
    first = [step(1, "kv2", "fused", 3.0), step(8, "kv2", "fused", 4.0)]
    second = [step(1, "kv2", "fused", 2.0), step(8, "kv2", "fused", 0, p50_ms=None, note="the time was over")]
    (tmp_path / "latency_a_h200.json").write_bytes(rows_json(machine, latency=first, largest=[]))
    (tmp_path / "latency_b_h200.json").write_bytes(rows_json(machine, latency=second, largest=[]))
    steps = Published.read(tmp_path).steps
    assert [row["p50_ms"] for row in steps.rows] == [2.0, 4.0]
    assert [name for name, _ in steps.runs] == ["latency_a_h200.json", "latency_b_h200.json"]


def test_times_are_those_without_the_profiler(tmp_path: Path, machine) -> None:
    profile = Profile("graph", 64.0, 2000.0, [KernelTime("moe_kernel", 32.0, 1500.0)])
    plain, profiled = step(1, "kv2", "fused", 2.0), step(1, "kv2", "fused", 9.0, profile=profile)
    for first, second in ((plain, profiled), (profiled, plain)):
        (tmp_path / "latency_a_h200.json").write_bytes(rows_json(machine, latency=[first], largest=[]))
        (tmp_path / "latency_b_h200.json").write_bytes(rows_json(machine, latency=[second], largest=[]))
        (row,) = Published.read(tmp_path).steps.rows
        assert row["p50_ms"] == 2.0
        assert row["profile"]["us"] == 2000.0


# --- files ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_document_and_pictures(results: Path, tmp_path: Path, capsys) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "README.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nEnd.\n")
    assert main(["report", "--results", str(results), "--docs", str(docs)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(PICTURES)
    text = (docs / "README.md").read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n\n## Results\n")
    assert text.endswith(f"{END}\n\nEnd.\n")
    assert "old" not in text
    assert {path.name for path in docs.glob("*.png")} == set(PICTURES)
    assert all((docs / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    publish(results, docs)
    assert (docs / "README.md").read_text() == text


@pytest.mark.parametrize("content", ["[]", "{", '{"machine": {}}', '{"latency": []}'])
def test_what_is_no_file_of_results(tmp_path: Path, content: str) -> None:
    (tmp_path / "latency_h200.json").write_text(content)
    with pytest.raises(StorageError, match=r"latency_h200\.json is no file of results"):
        Published.read(tmp_path)


def test_a_document_without_a_place_for_results(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(StorageError, match="has no place for results"):
        with_results(tmp_path / "README.md", "")
    with pytest.raises(StorageError, match="can't be read"):
        with_results(tmp_path / "none.md", "")
    with pytest.raises(StorageError, match="there is no folder"):
        Published.read(tmp_path / "nowhere")


def test_rows_of_a_file_are_those_of_the_run(results: Path) -> None:
    (read,) = Published.read(results).moe.rows
    assert read == json.loads(json.dumps(asdict(MOE)))


def test_a_remark_is_told(results: Path, machine) -> None:
    disturbed = step(4, "kv2", "fused", 2.5, p99_over_p50=3.0, note="another benchmark ran on this host")
    (results / "latency_h200.json").write_bytes(rows_json(machine, latency=[*STEPS, disturbed], largest=LARGEST))
    text = render(Published.read(results))
    assert r"2.50 / 2.55\*" in text
    assert r"- \* another benchmark ran on this host" in text
    assert r"2.12 / 2.17 |" in text
    assert "p99/p50 of fused steps over `kv2` is 1.020 at 2k, 1.020 to 3.000 at 32k" in text


def test_a_remark_of_most_is_told_once(results: Path, machine) -> None:
    steps = [replace(row, note="another benchmark ran on this host") for row in STEPS[:2]]
    quiet = step(4, "kv2", "fused", 2.5)
    (results / "latency_h200.json").write_bytes(rows_json(machine, latency=[*steps, quiet], largest=LARGEST))
    text = render(Published.read(results))
    assert "Of all without a star, another benchmark ran on this host." in text
    assert r"- \* nothing else ran on this host" in text
    assert r"| 2.12 / 2.17 | 2.50 / 2.55\* | 3.00 / 3.06 |" in text


def test_what_has_no_room_is_told_by_the_smallest_batch(results: Path, machine) -> None:
    none = {"p50_ms": None, "p99_ms": None}
    steps = [step(b, "bf16", moe, 0, note=f"{b} GB", **none) for b in (16, 32) for moe in ("fused", "unfused")]
    (results / "latency_h200.json").write_bytes(rows_json(machine, latency=[STEPS[0], *reversed(steps)], largest=[]))
    text = render(Published.read(results))
    assert "Without a figure:\n\n- `seed-32b-a7b`, 32k, bf16, batch 16, 32: 16 GB\n\n" in text
