from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_bench_report import APPEND, MISSING, ROW

from subten.bench import session
from subten.bench.__main__ import app, main
from subten.bench.session import AttentionOptions, MeanKeys
from subten.bench.shapes import Case, Shape

DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, machine) -> list[tuple[Case, list[str], tuple[bool, ...]]]:
    """A GPU that is none; what was asked of it."""
    asked: list[tuple[Case, list[str], tuple[bool, ...]]] = []

    class Bench:
        def __init__(self, *_) -> None:
            pass

        def rows(self, case, wanted):
            asked.append((case, [fmt.name for fmt in wanted.formats], wanted.mean_keys))
            yield MISSING if case.context == 1024 else ROW

    monkeypatch.setattr(session, "require_gpu", lambda: None)
    monkeypatch.setattr(session, "describe", lambda *_: machine)
    monkeypatch.setattr(session, "AttentionBench", Bench)
    monkeypatch.setattr(session, "compile_ahead", lambda *_: "compiled ahead")
    monkeypatch.setattr(session, "measure_append", lambda *_: APPEND)
    return asked


def test_without_a_gpu_one_sentence_and_exit_code_2() -> None:
    command, none_visible = [sys.executable, "-m", "subten.bench", "attention"], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | none_visible)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the benchmarks measure a CUDA GPU, and torch finds none here; run them on a machine that has one"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1x8"], "'1x8' is no shape"),
        (["--contexts", "1m"], "'1m' is no context"),
        (["--formats", "kv3"], "there is no KV format 'kv3'"),
        (["--kernels", "cuda"], "--kernels is 'cuda'; it takes triton and gluon"),
        (["--kernels", ","], "--kernels is ','"),
        (["--quick", "--contexts", "1k"], "--quick has none of these rows"),
        (["--replays", "3"], "Invalid value for '--replays'"),
        (["--mean-key", "never"], "Invalid value for '--mean-key'"),
        (["--json", "/nowhere/rows.json"], "can't be written"),
    ],
)
def test_what_can_not_be_done_is_one_line(arguments, message, capsys: pytest.CaptureFixture[str], gpu) -> None:
    assert main(["attention", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_rows_are_printed_and_saved(gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--rows", "8x8x4", "--contexts", "4k,32k", "--mean-key", "with", "--json", str(path)]
    assert main(["attention", *arguments]) == 0
    assert gpu == [
        (Case(Shape(8, 8, 4), 4096), ["kv2"], (True,)),
        (Case(Shape(8, 8, 4), 32768), ["kv2", "kv4", "fp8", "bf16"], (True,)),
    ]
    content = json.loads(path.read_text())
    assert [len(content[part]) for part in ("attention", "crossover", "kv_append")] == [2, 0 + 1, 3]
    out = capsys.readouterr().out
    assert "kv2 gluon + mean key" in out
    assert "kv_append" in out


def test_a_missing_figure_is_exit_code_1(gpu) -> None:
    assert main(["attention", "--rows", "1x8x4", "--contexts", "1k", "--no-append"]) == 1


def test_quick_is_the_main_format_without_append(gpu, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--quick"]) == 0
    assert len(gpu) == 5
    assert all(formats == ["kv2"] and terms == (False, True) for _, formats, terms in gpu)
    assert "kv_append" not in capsys.readouterr().out


def test_formats_that_were_asked_for_are_measured_everywhere() -> None:
    options = AttentionOptions.parse(
        rows="1x8x4",
        contexts="1k,32k",
        formats="kv4,fp8",
        kernels="triton",
        mean_key=MeanKeys.WITHOUT,
        quick=False,
        append=None,
        replays=25,
    )
    assert [[fmt.name for fmt in options.wanted(case).formats] for case in options.cases] == [["kv4", "fp8"]] * 2
    assert options.append
    assert options.wanted(options.cases[0]).mean_keys == (False,)


def test_every_option_is_documented() -> None:
    command = typer.main.get_command(app).commands["attention"]
    named = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} - {"--help"}
    assert named
    assert all(f"`{option}" in DOCUMENT for option in named)
