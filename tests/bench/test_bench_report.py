from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from subten.bench.recording import Recorder
from subten.bench.report import (
    AppendRow,
    AttentionRow,
    Crossover,
    append_line,
    append_table,
    attention_table,
    crossover_table,
    crossovers,
    row_line,
)
from subten.bench.session import Results
from subten.bench.shapes import Case, Shape
from subten.outputs import OutputFile

DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
ROW = AttentionRow(
    batch=8,
    kv_heads=8,
    group=4,
    head_dim=128,
    context=32768,
    format="kv2",
    kernel="gluon",
    mean_key=True,
    us=50.0,
    us_p10=49.0,
    us_p90=51.0,
    baseline_us=250.0,
    baseline="cudnn",
    ratio=5.0,
    fa3_us=None,
    fa3_fp8_us=None,
    bytes=150_000_000,
    tb_per_s=3.0,
    read_share=0.75,
    error=3e-4,
    note="fa3: not given with --fa3",
)
MISSING = replace(ROW, us=None, us_p10=None, us_p90=None, ratio=None, tb_per_s=None, read_share=None, note="wrong")
APPEND = AppendRow(1, 8, 4, 128, "kv2", 32, 2.5, 2.0, 16.0, 1e-3, None)


def at(ratios: dict[int, float | None], batch: int = 1) -> list[AttentionRow]:
    return [replace(ROW, batch=batch, context=context, ratio=ratio) for context, ratio in ratios.items()]


def printed(table) -> str:
    console = Console(width=200, record=True)
    console.print(table)
    return console.export_text()


def test_a_crossover_is_where_it_stays_faster() -> None:
    (found,) = crossovers(at({1024: 1.1, 2048: 0.98, 4096: 1.0, 8192: 2.0}))
    assert found == Crossover(1, 8, 4, 128, "kv2", "gluon", True, 4096, 0.98, 2048)


def test_faster_from_the_start_and_never() -> None:
    rows = at({1024: 1.5, 2048: 2.0}) + at({2048: 0.9, 1024: 1.2}, batch=32)
    assert [(x.batch, x.context) for x in crossovers(rows)] == [(1, 1024), (32, None)]


def test_one_context_or_no_figure_has_no_crossover() -> None:
    assert crossovers(at({1024: 1.5})) == []
    assert crossovers(at({1024: 1.5, 2048: None})) == []


def test_rows_are_said_and_saved_as_they_come(
    machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    results = Results(Recorder(machine, OutputFile(path), start=100.0))
    monkeypatch.setattr("subten.bench.recording.time", SimpleNamespace(monotonic=lambda: 112.3))
    for rows, row in enumerate((ROW, MISSING, APPEND), 1):
        results.take(row)
        content = json.loads(path.read_bytes())
        assert len(content["attention"]) + len(content["kv_append"]) == rows
    assert list(content) == ["machine", "attention", "crossover", "kv_append"]
    assert content["machine"]["read_tb_per_s"] == 2.0
    assert content["attention"][0]["ratio"] == 5.0
    assert content["attention"][0]["fa3_us"] is None
    assert content["attention"][1]["us"] is None
    assert content["kv_append"][0]["us"] == 2.5
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[  12 s] {line}" for line in (row_line(ROW), row_line(MISSING), append_line(APPEND))]


def test_every_key_is_documented(machine) -> None:
    documented = set(re.findall(r"`(\w+)`", DOCUMENT))
    for kind in (AttentionRow, AppendRow, Crossover, type(machine)):
        missing = {f.name for f in fields(kind)} - documented
        assert not missing, kind.__name__


def test_a_row_knows_its_case() -> None:
    assert ROW.case == Case(Shape(8, 8, 4), 32768)


def test_lines() -> None:
    line = row_line(ROW)
    for text in ("8x8x4", "32k", "kv2 gluon + mean key", "50.0 us", "250.0", "5.00", "3.00 TB/s", "75%"):
        assert text in line
    assert "fa3: not given" in line
    assert row_line(MISSING).endswith("no figure: wrong")
    assert "2.50 us per layer (append 2.00, codes of 32 layers 16.0)" in append_line(APPEND)
    assert append_line(replace(APPEND, us=None, note="broken")).endswith("no figure: broken")


def test_tables_say_what_is_absent(machine) -> None:
    text = printed(attention_table([ROW, MISSING], machine))
    assert "fa3: not given with --fa3" in text
    assert "wrong" in text
    assert "reads 2.00 TB/s" in text
    assert re.search(r"8x8x4 +32k +kv2 gluon \+ mean key +50\.0 +250\.0 +5\.00 +- +- +3\.00 +75% +3\.0e-04", text)
    assert re.search(r"8x8x4 +32k +kv2 gluon \+ mean key +- +250\.0 +- ", text)


def test_other_tables() -> None:
    text = printed(crossover_table(crossovers(at({1024: 0.99, 4096: 2.0}))))
    assert re.search(r"1x8x4 +kv2 gluon \+ mean key +4k +0\.99 +1k", text)
    assert "never" in printed(crossover_table(crossovers(at({1024: 0.5, 4096: 0.6}))))
    assert re.search(r"1 +kv2 +2\.50 +2\.00 +16\.0 +32 +1\.0e-03", printed(append_table([APPEND])))
