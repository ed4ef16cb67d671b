"""Whatever a user gets wrong: one line on stderr, exit code 2, nothing on stdout, nothing on disk."""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subten.cli import main
from subten.errors import NumericalError
from support.tiny_model import save_tiny_model

Run = Callable[..., Any]


def assert_one_line(result: Any, *expected: str) -> None:
    assert result.exit_code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    for part in expected:
        assert part in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["frobnicate"], "No such command"),
        (["run"], "MODEL"),
        (["eval"], "Missing command"),
        (["run", "MODEL", "hi", "--frob"], "--frob"),
        (["run", "MODEL", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["run", "MODEL", "hi", "--max-tokens", "0"], "max_tokens is 0; it must be"),
        (["run", "MODEL", "hi", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (["run", "MODEL", "hi", "--top-p", "0"], "top_p is 0.0"),
        (["run", "MODEL", "hi", "--top-k", "-2"], "top_k is -2"),
        (["run", "MODEL", "hi", "--min-p", "2"], "min_p is 2.0"),
        (["run", "MODEL", "hi", "--seed", "9223372036854775808"], "seed is"),
        (["run", "MODEL", "hi", "--stop", ""], "stop is"),
        (["run", "MODEL", "hi", "--kv", "kv3"], "choose one of bf16"),
        (["run", "MODEL", "hi", "--sinks", "-1"], "-1 sinks"),
        (["run", "MODEL", "hi", "--prefill", "sideways"], "it must be window or chunk"),
        (["run", "MODEL", "hi", "--chunk-size", "0"], "chunk_size is 0"),
        (["run", "MODEL", "hi", "--context", "0"], "max_context is 0"),
        (["run", "MODEL", "hi", "--context", "9999"], "1 to 1024"),
        (["run", "MODEL", "hi", "--dtype", "int8"], "there is no dtype 'int8'"),
        (["run", "MODEL", "hi", "--device", "abacus"], "use auto, cpu or cuda"),
        (["run", "MODEL", "hi", "--kernel", "moe"], "it must be OPERATION=NAME"),
        (["run", "MODEL", "hi", "--kernel", "frob=torch"], "no operation 'frob'"),
        (["run", "MODEL", "hi", "--kernel", "moe=abacus"], "no moe kernel 'abacus'"),
        (["run", "MODEL", "hi", "--system", "be kind"], "--system needs --chat"),
        (["run", "MODEL", ""], "the prompt has no tokens"),
        (["run", "MODEL", "far too long", "--context", "8"], "the prompt has 12 tokens"),
        (["run", "no-such-model", "hi"], "there is no model 'no-such-model'"),
        (["run", "no/such/model", "hi"], "no/such/model does not exist"),
        (["run", "~nobody-of-this-name/model", "hi"], "the home folder of nobody here"),
        (["run", "", "hi"], "the name of the model is empty"),
        (["pull", "no-such-model"], "to pull"),
        (["pull", "smollm2", "--source", "moon"], "it can be auto, hub or wheel"),
        (["info", "no-such-model"], "there is no model"),
        (["demo", "no-such-model"], "there is no model"),
        (["demo", "MODEL", "--kv", "kv3"], "choose one of bf16"),
        (["demo", "MODEL", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "MODEL", "--max-tokens", "1000"], "no room for a document"),
        (["calibrate", "no-such-model"], "there is no model"),
        (["calibrate", "MODEL", "--tokens", "3"], "--tokens"),
        (["calibrate", "MODEL", "--text", "missing.txt"], "missing.txt can't be read: No such file"),
        (["calibrate", "MODEL", "--text", "short.txt"], "at least 64 are needed"),
        (["eval", "kv", "MODEL"], "--text"),
        (["eval", "kv", "no-such-model", "--text", "TEXT"], "there is no model"),
        (["eval", "kv", "MODEL", "--text", "missing.txt"], "missing.txt can't be read"),
        (["eval", "kv", "MODEL", "--text", "binary.txt"], "binary.txt is not UTF-8 text"),
        (["eval", "kv", "MODEL", "--text", "."], "can't be read: Is a directory"),
        (["eval", "kv", "MODEL", "--text", "short.txt"], "the text has 5 tokens and 4 windows of 1024 need 4096"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--formats", " , "], "--formats is empty"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--formats", "kv2,kv3"], "no KV format 'kv3'"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--context", "1"], "context is 1; it must be at least 2"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--tokens", "9"], "it must be at least the context, 1024"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--decode-tail", "-1"], "--decode-tail"),
        (
            ["eval", "kv", "MODEL", "--text", "TEXT", "--prefill", "x", "--context", "8", "--tokens", "8"],
            "window or chunk",
        ),
        (
            ["eval", "kv", "MODEL", "--text", "TEXT", "--json", "missing/rows.json"],
            "missing/rows.json can't be written",
        ),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--json", "."], "not a regular file"),
        (
            ["eval", "kv", "MODEL", "--text", "TEXT", "--plot", "missing/plot.png"],
            "missing/plot.png can't be written",
        ),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--plot", "plot.txt"], "can't be a '.txt' file"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--plot", "a.png", "--json", "a.png"], "give two files"),
        (
            ["eval", "kv", "MODEL", "--text", "short.txt", "--json", "short.txt"],
            "--text and --json both name short.txt",
        ),
        (["eval", "layers", "MODEL", "--text", "short.txt", "--json", "./short.txt"], "--text and --json both name"),
        (["eval", "generate", "MODEL", "--text", "short.txt", "--json", "alias.txt"], "--text and --json both name"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--json", "loop"], "loop can't be written"),
        (["eval", "kv", "MODEL", "--text", "TEXT", "--json", "~nobody-of-this-name/x"], "can't be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    subten: Run,
    model: str,
    text_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "alias.txt").symlink_to("short.txt")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "binary.txt").write_bytes(b"text \xff\xfe")
    before = sorted(tmp_path.iterdir())
    names = {"MODEL": model, "TEXT": text_file}
    assert_one_line(subten(*(names.get(argument, argument) for argument in arguments)), expected)
    assert sorted(tmp_path.iterdir()) == before


def test_a_truncated_checkpoint_is_one_line(subten: Run, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for command in (["run", folder, "hi"], ["calibrate", folder], ["demo", folder]):
        assert_one_line(subten(*command), "model.safetensors")


def test_an_unknown_architecture_is_one_line(subten: Run, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("llama", "abacus").replace("Llama", "Abacus"))
    for command in (["run", folder, "hi"], ["info", folder]):
        assert_one_line(subten(*command), "bacus")


def test_a_model_that_computes_nan_is_one_line(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from subten.models import Decoder

    nan = torch.full((1, 258), torch.nan)
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: nan.expand(hidden.shape[0], -1))
    assert_one_line(subten("run", model, "hi"), "not finite")


def test_chat_with_a_model_that_has_no_template_is_one_line(
    subten: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "base", chat_template=None)
    assert_one_line(subten("run", folder, "hi", "--chat"), "no chat template")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert_one_line(subten("run", folder), "no chat template")


def test_a_picture_without_matplotlib_is_one_line(
    subten: Run, model: str, text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = subten("eval", "kv", model, "--text", text_file, "--plot", tmp_path / "plot.png")
    assert_one_line(result, "pip install 'subten[plot]'")


def test_an_unwritable_model_folder_is_one_line(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, content: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert_one_line(subten("calibrate", model), "can't be written: Permission denied")


def test_a_message_of_several_lines_becomes_one(subten: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> Path:
        raise NumericalError("first\n  second\n\nthird")

    monkeypatch.setattr("subten.checkpoints.resolve_model", fail)
    assert_one_line(subten("info", "x"), "first second third")


def test_a_bug_is_not_disguised_as_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> Path:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("subten.checkpoints.resolve_model", fail)
    with pytest.raises(ZeroDivisionError):
        main(["info", "x"])


def test_ctrl_c_in_a_long_evaluation_leaves_with_130_and_no_half_file(
    subten: Run, model: str, text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subten.evals import quality

    compared = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal compared
        compared += 1
        if compared == 3:
            raise KeyboardInterrupt
        return compare(*arguments)

    compare = quality.compare
    monkeypatch.setattr(quality, "compare", interrupted)
    (tmp_path / "rows.json").write_text("old")
    result = subten(
        *("eval", "kv", model, "--text", text_file, "--formats", "kv2,kv4", "--context", "64", "--tokens", "128"),
        *("--json", tmp_path / "rows.json", "--plot", tmp_path / "plot.png"),
    )
    assert (result.exit_code, result.out, result.err) == (130, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert (tmp_path / "rows.json").read_text() == "old"


def test_ctrl_c_leaves_with_130(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("subten.cli.run.write_text", interrupt)
    result = subten("run", model, "hi")
    assert (result.exit_code, result.err) == (130, "")


def launch(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    code = "import sys; from subten.cli import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **options)


@pytest.mark.parametrize("command", [["--help"], ["info"]])
def test_a_reader_that_goes_away_is_no_traceback(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = launch(*command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, b"")


SAY = ["run", "MODEL", "hi", "--max-tokens", "3", "--temperature", "0"]


@pytest.mark.parametrize(
    ("arguments", "redirection", "exit_code"),
    [
        (["info"], ">&-", 0),
        (["info"], "<&-", 0),
        (["no-such-command"], "2>&-", 2),
        (["run", "MODEL"], "<&-", 2),
        (SAY, ">&- <&- 2>&-", 0),
    ],
)
def test_closed_standard_streams_are_no_traceback(
    model: str, arguments: list[str], redirection: str, exit_code: int
) -> None:
    words = " ".join(model if argument == "MODEL" else argument for argument in arguments)
    command = f"{sys.executable} -m subten {words} {redirection}"
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == exit_code, result.stderr
    assert "Traceback" not in result.stderr


def test_rows_do_not_replace_the_file_that_the_output_goes_to(model: str, text_file: str, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("before\n")
    arguments = ("eval", "kv", model, "--text", text_file, "--json")
    for name in ("/dev/stdout", str(path)):
        with path.open("ab") as out:
            process = launch(*arguments, name, stdout=out, stderr=subprocess.PIPE)
            _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert err.endswith(b"can't be written: what is printed goes there; name another file\n")
        assert path.read_text() == "before\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["info"], SAY])
def test_a_full_disk_behind_the_output_is_one_line(model: str, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = launch(
            *(model if argument == "MODEL" else argument for argument in arguments),
            stdout=full,
            stderr=subprocess.PIPE,
        )
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err == b"error: the output can't be written: No space left on device; send it elsewhere\n"


def test_characters_that_the_output_lacks_are_escaped(model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = launch("info", "MÜLL", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.communicate(timeout=120)[1].startswith(b"error: there is no model 'M\\xdcLL'")
    (tmp_path / "MÜLL").symlink_to(model)
    process = launch("info", str(tmp_path / "MÜLL"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert b"M\\xdcLL" in out


def test_a_prompt_that_is_not_utf_8_is_one_line(subten: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 noir")))
    assert_one_line(subten("run", model), "the standard input is not UTF-8 text", "at byte 3")
    for options in (["run", model, "caf\udce9"], ["run", model, "hi", "--chat", "--system", "caf\udce9"]):
        assert_one_line(subten(*options), "the text is not valid Unicode")


def test_where_triton_is_not_installed_torch_computes(model: str) -> None:
    """It is a dependency on x86-64 Linux alone."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from subten.cli import main\n"
        f"sys.exit(main(['info']) or main(['run', {model!r}, 'hi', '--max-tokens', '3']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "moe=torch" in result.stdout


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from subten.cli import main\n"
        "for arguments in ([], ['-h'], ['run', '--help'], ['eval', 'kv', '--help'], ['--version'], ['run']):\n"
        "    main(arguments)\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
