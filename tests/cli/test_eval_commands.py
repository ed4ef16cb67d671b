"""`subten eval retrieval`, `generate` and `layers`; `eval kv` is tested with the other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subten.engine import LLM, SamplingParams, load_model
from subten.engine.calibrate import shipped_text
from subten.evals.generation import cut_prompts

Run = Callable[..., Any]


def test_retrieval_writes_table_and_rows(subten: Run, model: str, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    result = subten(
        *("eval", "retrieval", model, "--lines", "10, 5,100", "--trials", "3", "--formats", "bf16,kv2"),
        *("--sinks", "4", "--recent", "16", "--seed", "3", "--chunk-size", "50", "--json", rows_file),
    )
    assert (result.exit_code, result.err) == (0, "")
    rows = json.loads(rows_file.read_text())
    assert [(row["lines"], row["format"]) for row in rows] == [(5, "bf16"), (5, "kv2"), (10, "bf16"), (10, "kv2")]
    for row in rows:
        assert (row["trials"], row["seed"], row["context"], row["prefill"]) == (3, 3, 1024, "window")
        assert (row["model"], row["chunk_size"], row["omitted"]) == ("tiny", 50, {"100": 1617})
        assert 0 <= row["recall"] <= 1
        assert row["log_probability"] < 0
        assert f"{row['log_probability']:.2f}" in result.out
    assert (rows[3]["sinks"], rows[3]["recent"], rows[3]["asked_in_codes"]) == (4, 16, 1)
    assert rows[3]["log_probability_change"] != 0
    assert "100 lines (1617 tokens)" in result.out


def test_generate_writes_table_and_rows(subten: Run, model: str, text_file: str, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    result = subten(
        *("eval", "generate", model, "--text", text_file, "--formats", "kv2,bf16", "--prompts", "2"),
        *("--prompt-tokens", "40", "--tokens", "30", "--sinks", "4", "--recent", "16", "--json", rows_file),
    )
    assert (result.exit_code, result.err) == (0, "")
    wide, coded = json.loads(rows_file.read_text())
    assert [wide["format"], coded["format"]] == ["bf16", "kv2"]
    assert (wide["identical"], wide["same_tokens"], wide["median_gap"]) == (2, 30, None)
    for row in (wide, coded):
        assert (row["prompts"], row["prompt_tokens"], row["tokens"]) == (2, 40, 30)
    loaded = load_model(model)
    prompts = cut_prompts(loaded.tokenizer.encode(Path(text_file).read_text()), 2, 40)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    options = {"max_context": 70, "max_batch": 2, "sinks": 4, "recent": 16}
    texts = [LLM(loaded, kv=kv, prefill="window", **options).generate(prompts, params) for kv in ("bf16", "kv2")]
    for position, (own, other) in zip(coded["first_difference"], zip(*texts, strict=True), strict=True):
        end = 30 if position is None else position
        assert own.token_ids[:end] == other.token_ids[:end]
        assert position is None or own.token_ids[end] != other.token_ids[end]
    assert f"{coded['same_tokens']:.0f}" in result.out
    assert f"{coded['distinct_2']:.0%}" in result.out


def test_generate_takes_its_prompts_from_the_text_that_ships(subten: Run, model: str) -> None:
    result = subten("eval", "generate", model, "--formats", "fp8", "--prompts", "1", "--tokens", "2")
    assert (result.exit_code, result.err) == (0, "")
    assert "2 greedy tokens after each of 1 prompts of 128" in result.out


def test_layers_writes_table_rows_and_picture(subten: Run, model: str, text_file: str, tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    options = ("--context", "128", "--tokens", "300", "--sinks", "4", "--recent", "16", "--json", rows_file)
    result = subten("eval", "layers", model, "--text", text_file, "--format", "kv2", *options, "--plot", picture)
    assert (result.exit_code, result.err) == (0, "")
    rows = json.loads(rows_file.read_text())
    assert [row["layers"] for row in rows] == [[0], [1], [0, 1]]
    for row in rows:
        assert (row["format"], row["context"], row["tokens"], row["windows"]) == ("kv2", 128, 256, 2)
        assert f"{row['kld']:.4f}" in result.out
    assert picture.read_text().lstrip().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "rows.json"]
    subten("eval", "kv", model, "--text", text_file, "--formats", "kv2", *options)
    (together,) = json.loads(rows_file.read_text())
    assert rows[2]["kld"] == pytest.approx(together["kld"], rel=1e-3)


def test_layers_measures_on_the_end_of_the_text_that_ships(subten: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "end.txt").write_text(shipped_text()[-64:])
    options = ("--context", "32", "--tokens", "64", "--format", "kv4", "--sinks", "0", "--recent", "4", "--json")
    for name, text in (("shipped", ()), ("own", ("--text", tmp_path / "end.txt"))):
        assert subten("eval", "layers", model, *text, *options, tmp_path / f"{name}.json").exit_code == 0
    shipped, own = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("shipped", "own"))
    assert [row["kld"] for row in shipped] == [row["kld"] for row in own]
    assert shipped[0]["text_sha256"] != own[0]["text_sha256"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["retrieval", "no-such-model"], "there is no model"),
        (["retrieval", "MODEL", "--lines", "100"], "a list of 100 lines takes 1617 tokens and the context is 1024"),
        (["retrieval", "MODEL", "--lines", "5,many"], "--lines is '5,many'; it must be whole numbers"),
        (["retrieval", "MODEL", "--lines", "-5"], "it must be whole numbers"),
        (["retrieval", "MODEL", "--lines", " , "], "give one or more lengths"),
        (["retrieval", "MODEL", "--lines", "9001"], "give one or more lengths from 1 to 9000"),
        (["retrieval", "MODEL", "--trials", "0"], "--trials"),
        (["retrieval", "no-such-model", "--trials", "1001"], "--trials': Input should be less than or equal to 1000"),
        (["retrieval", "MODEL", "--formats", ""], "--formats is empty"),
        (["retrieval", "MODEL", "--lines", "5", "--prefill", "x"], "window or chunk"),
        (["retrieval", "MODEL", "--json", "missing/rows.json"], "missing/rows.json can't be written"),
        (["generate", "no-such-model"], "there is no model"),
        (["generate", "MODEL", "--tokens", "1000"], "take 1128 tokens and the context is 1024; ask for fewer tokens"),
        (["generate", "MODEL", "--tokens", "0"], "--tokens"),
        (["generate", "MODEL", "--text", "short.txt"], "the text has 5 tokens and 5 prompts of 128 need 640"),
        (["generate", "MODEL", "--text", "missing.txt"], "missing.txt can't be read"),
        (["generate", "MODEL", "--formats", "kv3"], "no KV format 'kv3'"),
        (["generate", "MODEL", "--json", "."], "not a regular file"),
        (["layers", "no-such-model"], "there is no model"),
        (["layers", "MODEL", "--format", "bf16"], "bf16 codes nothing"),
        (["layers", "MODEL", "--format", "kv3"], "no KV format 'kv3'"),
        (["layers", "MODEL", "--context", "2048"], "context is 2048; this model takes up to 1024"),
        (["layers", "MODEL", "--tokens", "9"], "it must be at least the context, 1024"),
        (["layers", "MODEL", "--plot", "plot.txt"], "can't be a '.txt' file"),
        (["layers", "MODEL", "--plot", "a.png", "--json", "a.png"], "give two files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    subten: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    result = subten("eval", *(model if argument == "MODEL" else argument for argument in arguments))
    assert (result.exit_code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert expected in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from subten.cli import main\n"
        "for name in ('retrieval', 'generate', 'layers'): main(['eval', name, '--help'])\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
