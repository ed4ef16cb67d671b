from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

from subten.bench import moe, moe_cases, moe_session
from subten.bench.__main__ import app, main
from subten.bench.moe import MoEBench, Tuned, load_peer, reference, shape_of
from subten.bench.moe_cases import DEMO, MODELS, MoECase, MoEModel, build_problem, choose_cases, demo_problem
from subten.bench.moe_kernels import Variant, cut_copy, variants
from subten.bench.moe_report import MoERow, moe_line
from subten.bench.recording import rows_json
from subten.errors import ParameterError, StorageError
from subten.kernels.moe import RouterSpec, triton_decode
from subten.kernels.moe.gluon_plan import GluonMoETuning, plan_gluon_moe
from subten.kernels.moe.packing import wide_down
from subten.kernels.moe.plan import plan_moe
from subten.kernels.moe.unfused import moe_unfused
from support.interpreter import correct_numbers
from support.moe import expected

CPU = torch.device("cpu")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
TINY = MoEModel(RouterSpec(8, 2, True), 128, 64, 32)
EXACT = Variant("triton", "16bit", "fixed")
GLUON = replace(EXACT, kernel="gluon")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, timer, machine) -> MoEBench:
    correct_numbers(monkeypatch)
    monkeypatch.setitem(MODELS, "tiny", TINY)
    return MoEBench(machine, CPU, timer=timer)


def test_a_row(tiny: MoEBench) -> None:
    case = MoECase("tiny", 3, "block")
    exact, split = tiny.rows(case, [EXACT, Variant("triton", "fp8x2", "float")])
    assert exact.note is None
    assert exact.us == 8.0
    assert 0 < exact.error < 2e-3
    assert (split.activations, split.sums) == ("fp8x2", "float")
    assert exact.peers == {"unfused bf16": 8.0}
    assert exact.ratio == 1.0
    visited = exact.distinct_experts * 3 * 128 * 64 + 3 * 128 * 32
    assert exact.bytes == round(visited) + 2 * 3 * 128 * 2
    assert exact.share == pytest.approx(exact.bytes / 2e6 / 8)
    assert len({weights.gate_up.data_ptr() for weights in tiny._layers}) == len(tiny._layers) > 1


@pytest.mark.parametrize("kind", ["block", "bf16"])
def test_a_prompt_has_a_row_for_each_way(tiny: MoEBench, kind: str) -> None:
    case = MoECase("tiny", 70, kind)
    launches, unfused = tiny.rows(case, variants(case, ["triton", "unfused"], ["16bit"], ["fixed"]))
    assert (launches.kernel, launches.sums, launches.tokens) == ("triton", "fixed", 70)
    assert (unfused.kernel, unfused.sums, unfused.note) == ("unfused", "float", None)
    assert 0 < launches.error < 2e-3 < unfused.error < 1e-2
    assert launches.us == unfused.us == 8.0
    assert launches.bytes == unfused.bytes
    assert launches.peers == unfused.peers == {"unfused bf16": 8.0}


def test_unfused_prompts_find_experts_as_few_tokens_do(tiny: MoEBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(TINY, shared=64))
    monkeypatch.setattr(moe, "gluon_serves", lambda shape: shape == "tiny")
    seen = []
    monkeypatch.setattr(
        moe, "moe_unfused", lambda x, weights, **rest: seen.append(weights) or moe_unfused(x, weights, **rest)
    )
    (row,) = tiny.rows(MoECase("tiny", 65, "channel"), [Variant("unfused", "16bit", "float")])
    assert row.error < 1e-2
    assert {weights.down.ndim for weights in seen if weights.gate_up_scale is not None} == {4}


def test_no_figure_without_a_right_result(tiny: MoEBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "reference", lambda *problem: reference(*problem) * 1.1)
    (row,) = tiny.rows(MoECase("tiny", 2, "bf16"), [EXACT])
    assert row.us is row.share is row.ratio is None
    assert "relative error 9.1e-02" in row.note


@pytest.mark.parametrize("kind", moe_cases.WEIGHTS)
def test_the_reference_is_the_definition(tiny: MoEBench, kind) -> None:
    problem = build_problem(MoECase("tiny", 5, kind), [moe_cases.random_block(TINY, kind, CPU)], CPU)
    found = reference(problem.layers[0], problem.x[0], problem.logits[0])
    torch.testing.assert_close(found, expected(problem.x[0], problem.layers[0], problem.logits[0]))


def test_the_shipped_model_with_its_own_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate = import_module("subten.engine.calibrate")  # The package has a function of that name.
    text = calibrate.shipped_text()
    monkeypatch.setattr(calibrate, "shipped_text", lambda: text[:400])
    problem = demo_problem(4, 1 << 20, CPU)
    assert len(problem.layers) % 8 == 0
    assert problem.x[0].shape == (4, 512)
    assert 2 <= problem.distinct_experts <= 8
    assert not torch.equal(problem.x[0], problem.x[1])


def test_another_implementation_from_a_file(tiny: MoEBench, tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text(
        "from subten.bench.moe import reference\n"
        "NAME = 'theirs'\n"
        "def peer(weights, tokens, logits):\n"
        "    return lambda: reference(weights, tokens, logits)\n"
    )
    bench = replace(tiny, peers=dict([load_peer(file)]))
    (row,) = bench.rows(MoECase("tiny", 1, "channel"), [EXACT])
    assert row.peers["theirs"] == 8.0
    assert "unfused fp8: NotImplementedError" in row.note, "a CPU has no such product"
    file.write_text("NAME = 1 / 0")
    with pytest.raises(StorageError, match="is no peer: ZeroDivisionError"):
        load_peer(file)


def test_cases() -> None:
    assert len(choose_cases([], [], [])) == 6 * 7
    assert choose_cases([DEMO], ["4"], ["block", "channel"]) == (MoECase(DEMO, 4, "bf16"),)
    (prompt,) = choose_cases([DEMO], ["4096"], [], most=moe_cases.MOST_TOKENS)
    assert (prompt.is_prompt, prompt.launch_tokens) == (True, 64)
    for arguments in ((["phi"], [], []), ([], ["65"], []), ([], ["x"], []), ([], [], ["int4"])):
        with pytest.raises(ParameterError, match="separated by commas"):
            choose_cases(*arguments)


def test_the_gluon_kernel_where_it_serves() -> None:
    """Its rows come first: tokens in 16 bit, at shapes that it takes."""
    both = (["gluon", "triton"], ["16bit", "fp8"], ["fixed"])
    narrow, wide = MoECase(DEMO, 4, "bf16"), MoECase("mix-32b-a9b", 4, "block")
    assert variants(narrow, *both) == [EXACT]
    assert variants(replace(wide, weights="bf16"), *both) == [GLUON, EXACT]
    assert variants(wide, *both) == [GLUON, EXACT, replace(EXACT, activations="fp8")]
    assert variants(wide, ["gluon"], ["fp8"], ["fixed"]) == []
    assert variants(wide, ["unfused"], ["16bit"], ["fixed"]) == []
    ways = variants(replace(wide, tokens=65), ["unfused", "gluon"], ["16bit"], ["fixed"])
    assert ways == [GLUON, Variant("unfused", "16bit", "float")]
    assert variants(wide, ["gluon"], ["16bit"], ["fixed", "float"]) == [GLUON, replace(GLUON, sums="float")]
    gluon = {name for name in MODELS if variants(MoECase(name, 1, "block"), ["gluon"], ["16bit"], ["fixed"])}
    assert gluon == set(MODELS)


def test_a_cut_copy_leaves_what_others_read(tiny: MoEBench) -> None:
    weights = moe_cases.random_block(replace(TINY, shared=64), "block", CPU)
    before = wide_down(weights.experts, slice(None), torch.float32)
    cut = cut_copy(weights)
    assert cut.gate_up is weights.gate_up
    assert cut.down.shape == (8, 1, 128, 64)
    for kept in (weights, cut):
        assert torch.equal(wide_down(kept.experts, slice(None), torch.float32), before)


def test_the_layers_of_a_shape_are_cut_once(tiny: MoEBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gluon kernel, which the interpreter can't run, is played by the other one."""
    monkeypatch.setitem(MODELS, "tiny", replace(TINY, shared=64))
    seen = []

    def decode(x, weights, plan, scratch, **rest):
        seen.append(weights.down)
        return triton_decode.moe_decode(x, weights, plan, scratch, **rest)

    monkeypatch.setattr(moe, "module_of", lambda kernel: SimpleNamespace(moe_decode=decode))
    monkeypatch.setattr(moe, "make_plan", lambda variant, shape, *rest: plan_moe(shape, *rest[:2]))
    rows = [row for tokens in (1, 2) for row in tiny.rows(MoECase("tiny", tokens, "block"), [GLUON, EXACT])]
    assert [(row.kernel, row.note) for row in rows] == [("gluon", None), ("triton", None)] * 2
    cut = {down.data_ptr() for down in seen if down.ndim == 4}
    assert cut
    assert cut <= {weights.down.data_ptr() for weights in tiny._cut}
    assert len(tiny._cut) == len(tiny._layers)
    assert not cut & {weights.down.data_ptr() for weights in tiny._layers}
    list(tiny.rows(MoECase("tiny", 1, "bf16"), [EXACT]))
    assert not tiny._cut


def test_the_seed_model_is_as_large_as_its_name_says() -> None:
    model = MODELS["seed-32b-a7b"]
    one, shared = 3 * model.hidden * model.intermediate * 32, 3 * model.hidden * model.shared * 32
    beside = 32 * 2 * model.hidden * (model.hidden + 1024) + 2 * 32_000 * model.hidden
    assert 8 * one + shared + beside == pytest.approx(32e9, rel=0.01)
    assert one + shared + beside == pytest.approx(7e9, rel=0.01)


ROW = MoERow(
    "mix-32b-a9b", 8, "block", "gluon", "16bit", "fixed", 7.2, 250.0, 249.0, 251.0, 10**9, 220.0, 0.88, 3e-4,
    "unfused bf16", 500.0, 2.0, {"unfused bf16": 500.0}, None,
)  # fmt: skip


def test_rows_are_printed_and_saved(monkeypatch, machine, tmp_path: Path, capsys) -> None:
    missing = replace(ROW, us=None, note="wrong")

    class Bench:
        def __init__(self, *_) -> None:
            pass

        def rows(self, case, wanted):
            yield ROW if case.tokens == 8 else missing

    for name, fake in {"require_gpu": lambda: CPU, "describe": lambda *_: machine, "MoEBench": Bench}.items():
        monkeypatch.setattr(moe_session, name, fake)
    monkeypatch.setattr(moe_session, "compile_moe_ahead", lambda *_: "compiled ahead")
    monkeypatch.setitem(MODELS, "mix-32b-a9b", TINY)
    path = tmp_path / "rows.json"
    arguments = ["moe", "--shapes", "mix-32b-a9b", "--activations", "16bit", "--json", str(path), "--tokens"]
    assert main([*arguments, "8"]) == 0
    (row,) = json.loads(path.read_text())["moe"]
    assert row["peers"] == {"unfused bf16": 500.0}
    assert row["kernel"] == "gluon"
    assert "ratio 2.00" in capsys.readouterr().out
    assert main([*arguments, "8,16"]) == 1
    assert "no figure: wrong" in capsys.readouterr().out
    assert main([*arguments, "8,8193"]) == 2
    assert "numbers from 1 to 8192" in capsys.readouterr().err
    assert main(["moe", "--kernels", "cuda"]) == 2
    assert "--kernels is 'cuda'" in capsys.readouterr().err
    assert main(["moe", "--sums", "int"]) == 2
    assert "--sums is 'int'" in capsys.readouterr().err


def test_plans_that_a_tool_found(tmp_path: Path) -> None:
    case, shape = MoECase("tiny", 8, "block"), shape_of(MoECase("qwen3-30b-a3b", 1, "bf16"))
    default = Tuned().plan(case, EXACT, shape, 132)
    assert default == plan_moe(shape, 8, 132)
    rows = [
        {"case": asdict(replace(case, tokens=n)), "variant": asdict(EXACT), "us": us, "plan": asdict(plan)}
        for n, stages, us in ((8, 5, 9.0), (8, 4, 8.0), (8, 6, None), (64, 2, 1.0))
        for plan in [replace(default, tuning=replace(default.tuning, stages=stages))]
    ]
    file = tmp_path / "tuned.json"
    other = plan_gluon_moe(shape, 8, 132, tuning=GluonMoETuning(64, 8, 4, 5))
    rows.append({"case": asdict(case), "variant": asdict(GLUON), "us": 7.0, "plan": asdict(other)})
    file.write_text(json.dumps({"moe": rows}))
    tuned = Tuned.read(file)
    assert tuned.plan(case, GLUON, shape, 132) == other
    assert tuned.plan(replace(case, tokens=1), GLUON, shape, 132) == plan_gluon_moe(
        shape, 1, 132, tuning=other.tuning
    )
    assert Tuned().plan(case, GLUON, shape, 132) == plan_gluon_moe(shape, 8, 132)
    assert [tuned.plan(replace(case, tokens=n), EXACT, shape, 132).tuning.stages for n in (1, 8, 16, 32)] == [
        4,
        4,
        4,
        2,
    ]
    assert asdict(tuned.plan(replace(case, tokens=512), EXACT, shape, 132)) == rows[3]["plan"]
    assert tuned.plan(case, Variant("triton", "fp8", "fixed"), shape, 132).tuning.activations == "fp8"
    file.write_text("{}")
    with pytest.raises(StorageError, match="is no file of tools"):
        Tuned.read(file)


def test_a_row_without_a_peer_has_a_line(machine) -> None:
    row = replace(ROW, peer=None, peer_us=None, ratio=None, peers={})
    assert "no peer -" in moe_line(row)
    assert json.loads(rows_json(machine, moe=[row]))["moe"][0]["ratio"] is None


def test_every_option_and_key_is_documented() -> None:
    command = typer.main.get_command(app).commands["moe"]
    named = [o for p in command.params for o in p.opts if o != "--help"] + [f.name for f in fields(MoERow)]
    assert [name for name in named if f"`{name}" not in DOCUMENT] == []
