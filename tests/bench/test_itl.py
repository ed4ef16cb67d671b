from __future__ import annotations

import json
from pathlib import Path

import pytest

from subten.bench import itl, model_shapes
from subten.bench.__main__ import main
from support.tiny_shape import TINY

SMALL = ["--prompt", "512", "--chunk-size", "128", "--device", "cpu"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(itl, "_ALONE", 5)
    monkeypatch.setattr(itl, "_STREAM_PROMPT", 32)


def test_streams_beside_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["itl", "tiny", *SMALL, "--budget", "none,0.001", "--streams", "2", "--json", str(path)]) == 0
    whole, paced = json.loads(path.read_text())["itl"]
    assert (whole["budget_ms"], whole["within"]) == (None, None)
    assert paced["budget_ms"] == 0.001
    assert 0 <= paced["within"] <= 1
    for row in (whole, paced):
        assert row["streams"] == 2
        assert 0 < row["alone_p50_ms"] <= row["alone_p99_ms"]
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["prompt_s"] > 0
        assert row["note"] is None
    # With whole chunks there is a token behind each of them; a budget that nothing keeps leaves one layer at a time.
    assert whole["tokens"] <= paced["tokens"]
    assert "beside it p50" in capsys.readouterr().out


def test_a_link_to_the_rows_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "rows.json", tmp_path / "link.json"
    link.symlink_to(path)
    assert main(["itl", "tiny", *SMALL, "--budget", "none", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert len(json.loads(path.read_text())["itl"]) == 1


def test_a_prompt_that_takes_too_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    clock = iter(range(10**6))
    monkeypatch.setattr(itl, "monotonic", lambda: next(clock))
    arguments = ["--budget", "none", "--seconds", "7", "--json", str(path)]
    assert main(["itl", "tiny", *SMALL, *arguments]) == 1
    (row,) = json.loads(path.read_text())["itl"]
    assert row["prompt_s"] is None
    assert "of 384 tokens of the prompt were computed" in row["note"]


def test_streams_last_as_long_as_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(itl, "_ALONE", 400)
    arguments = ["--chunk-size", "32", "--budget", "none,0.001", "--streams", "3", "--json", str(path)]
    assert main(["itl", "tiny", "--prompt", "416", "--device", "cpu", *arguments]) == 0
    whole, paced = json.loads(path.read_text())["itl"]
    assert (whole["tokens"], whole["note"]) == (12, None)
    assert (paced["tokens"], paced["note"]) == (24, None)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("tiny", ["--prompt", "2k"], "--prompt has 2048 tokens, and tiny takes 1024; shorten the prompt"),
        ("demo-moe", ["--prompt", "2k"], "--prompt has 2048 tokens, and demo-moe takes 1024"),
        (
            "tiny",
            ["--prompt", "1000", "--chunk-size", "2"],
            "a stream beside this prompt may need 1043 tokens, and tiny takes 1024; "
            "take a shorter prompt, larger chunks or fewer streams",
        ),
    ],
)
def test_a_model_without_room_is_refused_before_anything_starts(
    model: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert main(["itl", model, *SMALL, *arguments, "--json", str(path)]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "--budget is 'soon'; it takes milliseconds or none"),
        (["--budget", "0"], "--budget is '0'"),
        (["--prompt", "60"], "--prompt has 60 tokens; with chunks of 128 it takes 256 or more"),
        (["--kv", "kv3"], "there is no KV format 'kv3'"),
    ],
)
def test_what_makes_no_sense(arguments, message, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["itl", "tiny", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 256), ("cuda", 1024), ("auto", 1024)])
def test_chunks_are_those_of_the_engine(device: str, chunk: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["itl", "tiny", "--prompt", "60", "--device", device]) == 2
    assert f"with chunks of {chunk} it takes {2 * chunk} or more" in capsys.readouterr().err
