from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

from subten.bench import linear, linear_session
from subten.bench.__main__ import app, main
from subten.bench.article import render
from subten.bench.linear import TORCH_BF16, TORCH_FP8, LinearBench, kernel_calls, reference
from subten.bench.linear_cases import (
    Layer,
    LinearCase,
    build_inputs,
    choose_cases,
    empty_weights,
    layers_of,
    parse_layer,
    random_weights,
)
from subten.bench.linear_report import LinearRow, linear_line, linear_table
from subten.bench.model_shapes import SHAPES
from subten.bench.processes import in_processes
from subten.bench.published import Published
from subten.bench.recording import rows_json
from subten.errors import ParameterError
from subten.kernels.linear.reference import linear_reference
from support.interpreter import correct_numbers
from support.linear import exactly, normed_exactly

CPU = torch.device("cpu")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
TINY = Layer("qkv", 48, 512, norm=True, normed=True, residual=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, timer, machine) -> LinearBench:
    correct_numbers(monkeypatch)
    return LinearBench(machine, CPU, timer=timer)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_row(bench: LinearBench, kind: str) -> None:
    (row,) = bench.rows(LinearCase(TINY, 3, kind), ["triton"])
    assert (row.layer, row.size, row.tokens, row.weights, row.kernel) == ("qkv", "48x512", 3, kind, "triton")
    assert row.us == 8.0
    assert 0 < row.error < linear.ALLOWED
    assert row.peers[TORCH_BF16] == 8.0
    assert row.ratio == 1.0
    assert row.bytes == 48 * 512 * (2 if kind == "bf16" else 1) + 2 * 3 * (512 + 48) * 2
    assert row.share == pytest.approx(row.bytes / 2e6 / 8)
    assert len({weights.weight.data_ptr() for weights in bench._copies}) == len(bench._copies) > 1


def test_a_result_in_float32_counts_as_one(bench: LinearBench) -> None:
    (row,) = bench.rows(LinearCase(Layer("vocabulary", 40, 256, norm=True, wide=True), 2, "fp8"), ["triton"])
    assert row.bytes == 40 * 256 + 2 * (2 * 256 + 4 * 40)
    assert row.error < 3e-3


def test_no_figure_without_a_right_result(bench: LinearBench, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference
    monkeypatch.setattr(linear, "reference", lambda one: replace(exact(one), normed=exact(one).normed * 1.1))
    (row,) = bench.rows(LinearCase(TINY, 2, "bf16"), ["triton"])
    assert row.us is row.share is row.ratio is None
    assert row.peers == {TORCH_BF16: 8.0}
    assert "relative error 9.1e-02" in row.note


def test_peers_are_checked_too(bench: LinearBench, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference
    monkeypatch.setattr(linear, "reference", lambda one: replace(exact(one), product=exact(one).product * 2))
    (row,) = bench.rows(LinearCase(TINY, 2, "fp8"), ["triton"])
    assert row.us == 8.0
    assert row.peer is row.peer_us is row.ratio is None
    assert f"{TORCH_BF16}: relative error 5.0e-01" in row.note
    assert f"{TORCH_FP8}: " in row.note


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_reference_is_the_definition(kind: str) -> None:
    (one, _) = build_inputs(LinearCase(TINY, 5, kind), random_weights(TINY, kind, 1, CPU), CPU)
    exact = reference(one)
    torch.testing.assert_close(
        exact.result, exactly(one.x, one.weights, norm=one.norm, residual=one.residual), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(exact.normed, normed_exactly(one.x, one.norm))
    torch.testing.assert_close(exact.product, exactly(one.x, one.weights))
    normed = torch.empty_like(one.x)
    linear_reference(one.x, one.weights, norm=one.norm, normed=normed)
    assert (normed.double() - exact.normed).norm() < 1e-2 * exact.normed.norm()


def test_what_the_gluon_kernel_does_not_take_has_no_figure(bench: LinearBench) -> None:
    gluon, triton = bench.rows(LinearCase(Layer("plain", 20, 528), 2, "bf16"), ["gluon", "triton"])
    assert gluon.us is None
    assert "the gluon kernel does not serve this layer: it takes up to 32 times 256 input channels" in gluon.note
    assert triton.us == 8.0


def test_each_kernel_has_tiles_of_its_own() -> None:
    case = LinearCase(Layer("plain", 5120, 2048), 8, "fp8")
    copies = build_inputs(case, [empty_weights(case.layer, "fp8", CPU)], CPU)
    gluon, triton = (kernel_calls(case, name, copies, 132)[0].args[3] for name in ("gluon", "triton"))
    assert (gluon.step, gluon.rows) == (128, 32)
    assert (triton.step, triton.rows) == (64, 16)


# --- cases ---------------------------------------------------------------------------------------------------------


def test_the_layers_of_a_model() -> None:
    qkv, o, router, vocabulary = layers_of(SHAPES["qwen3-30b-a3b"])
    assert (qkv.outputs, qkv.inputs, qkv.norm) == (5120, 2048, True)
    assert (o.outputs, o.inputs, o.norm, o.residual) == (2048, 4096, False, True)
    assert (router.outputs, router.inputs, router.normed, router.wide) == (128, 2048, True, True)
    assert (vocabulary.outputs, vocabulary.inputs, vocabulary.wide) == (151_936, 2048, True)
    assert layers_of(SHAPES["seed-32b-a7b"])[2].outputs == 9, "the gate of the shared expert is one more"


def test_cases() -> None:
    """A router stays in 16 bit."""
    assert len(choose_cases([], [], [])) == 2 * (3 * 2 + 1) * 4
    (router,) = (case for case in choose_cases([], ["8"], ["fp8"]) if case.layer.outputs == 8)
    assert router.weights == "bf16"
    assert choose_cases(["64x512"], ["4"], ["fp8"]) == (LinearCase(Layer("plain", 64, 512), 4, "fp8"),)
    layer = parse_layer("129x2048+normed+residual")
    assert (layer.name, layer.norm, layer.normed, layer.residual) == ("normed+residual", True, True, True)
    for arguments in (
        (["64"], [], []),
        (["64x512+bias"], [], []),
        (["0x512"], [], []),
        ([], ["65"], []),
        ([], ["x"], []),
        ([], [], ["int4"]),
    ):
        with pytest.raises(ParameterError, match="separated by commas"):
            choose_cases(*arguments)


def test_launches_in_other_processes() -> None:
    """A failure is met again where it is measured."""
    assert in_processes([str, "no number".index]).startswith("compiled ahead for 2 of 2 launches in ")


def test_what_differs_in_its_number_of_tokens_alone_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "in_processes", len)
    cases = choose_cases(["5120x2048+norm"], ["1", "8"], ["fp8"])
    assert linear.compile_linear_ahead(cases, ["triton"], 132) == 1
    assert linear.compile_linear_ahead(cases, ["gluon"], 132) == 2, "one token is loaded by threads"


# --- rows ----------------------------------------------------------------------------------------------------------

ROW = LinearRow(
    "qkv", 5120, 2048, 8, "fp8", "gluon", 5.0, 4.9, 5.1, 10**7, 2.5, 0.5, 2e-3, TORCH_BF16, 9.0, 1.8,
    {TORCH_BF16: 9.0, TORCH_FP8: 10.0}, None,
)  # fmt: skip
MISSING = replace(ROW, us=None, us_p10=None, us_p90=None, share=None, ratio=None, note="wrong")


def test_rows_are_printed_and_saved(monkeypatch, machine, tmp_path: Path, capsys) -> None:
    asked = []

    class Bench:
        def __init__(self, *_) -> None:
            pass

        def rows(self, case, kernels):
            asked.append(tuple(kernels))
            yield ROW if case.tokens == 8 else MISSING

    for name, fake in {"require_gpu": lambda: CPU, "describe": lambda *_: machine, "LinearBench": Bench}.items():
        monkeypatch.setattr(linear_session, name, fake)
    monkeypatch.setattr(linear_session, "compile_linear_ahead", lambda *_: "compiled ahead")
    path = tmp_path / "rows.json"
    arguments = ["linear", "--sizes", "5120x2048+norm", "--weights", "fp8", "--json", str(path), "--tokens"]
    assert main([*arguments, "8"]) == 0
    (row,) = json.loads(path.read_text())["linear"]
    assert row["peers"] == {TORCH_BF16: 9.0, TORCH_FP8: 10.0}
    assert "ratio 1.80" in capsys.readouterr().out
    assert main([*arguments, "8,16", "--kernels", "triton,gluon"]) == 1
    assert len(json.loads(path.read_text())["linear"]) == 2
    assert "no figure: wrong" in capsys.readouterr().out
    assert asked == [("gluon", "triton")] * 3
    for option, text in (("--kernels", "cuda"), ("--weights", "int8"), ("--tokens", "0"), ("--sizes", "12")):
        assert main(["linear", option, text]) == 2
        assert f"{option} " in capsys.readouterr().err


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["linear"]) != 0
    assert capsys.readouterr().err.count("\n") == 1


def test_a_row_without_a_peer_has_a_line(machine) -> None:
    row = replace(ROW, peer=None, peer_us=None, ratio=None, peers={}, note="torch: no")
    assert "no peer -" in linear_line(row)
    assert linear_line(row).endswith("(torch: no)")
    assert json.loads(rows_json(machine, linear=[row]))["linear"][0]["ratio"] is None
    console = Console(width=200, record=True)
    console.print(linear_table([row, MISSING], machine))
    printed = console.export_text()
    assert "torch: no; wrong" in printed
    assert "5120x2048" in printed


def test_the_chosen_kernel_is_published(tmp_path: Path, machine) -> None:
    """Where it has a figure."""
    slower = replace(ROW, kernel="triton", us=12.5)
    other = replace(MISSING, outputs=129), replace(slower, outputs=129)
    (tmp_path / "linear_h200.json").write_bytes(rows_json(machine, linear=[slower, ROW, *other]))
    text = render(Published.read(tmp_path))
    assert [line for line in text.splitlines() if line.startswith("#")] == ["## Results", "### Linear layers"]
    lines = [line for line in text.splitlines() if line.startswith("| qkv")]
    assert lines == [
        f"| qkv | 5120x2048 | fp8 | gluon | 8 | 5.00 (4.90, 5.10) | 2.50 | 50% | 9.00 | {TORCH_BF16} | 1.80 |",
        f"| qkv | 129x2048 | fp8 | triton | 8 | 12.50 (4.90, 5.10) | 2.50 | 50% | 9.00 | {TORCH_BF16} | 1.80 |",
    ]
    assert "[linear_h200.json]" in text


def test_every_option_and_key_is_documented() -> None:
    section = DOCUMENT[DOCUMENT.index("## Linear layers\n\n    python") :]
    command = typer.main.get_command(app).commands["linear"]
    named = [o for p in command.params for o in p.opts if o != "--help"] + [f.name for f in fields(LinearRow)]
    assert [name for name in named if f"`{name}" not in section] == []
