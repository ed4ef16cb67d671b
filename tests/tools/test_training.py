from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tools.demo_moe import export, plot_routing, text_pieces, train_tokenizer
from tools.demo_moe.average_weights import average, bits_per_token, spaced_windows
from tools.demo_moe.eval_heldout import routing_statistics
from tools.demo_moe.folders import load_folder
from tools.demo_moe.model import DemoConfig, DemoModel, hugging_face_config, hugging_face_tensors
from tools.demo_moe.muon import Muon, orthogonalise
from tools.demo_moe.token_data import MIX, TokenMix, bits_per_byte
from tools.demo_moe.weights_file import read_weights, write_weights

from tools import train_demo_moe

TINY = DemoConfig(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=16,
    max_context=64,
)
TEXT = "The old river runs by the grey town, and the well-known mill stands at its end. It cost 1,250 pounds.\n\n"


def tiny_model(experts: str = "dense") -> DemoModel:
    torch.manual_seed(0)
    model = DemoModel(TINY, experts, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def test_parameter_counts():
    model = tiny_model()
    assert TINY.parameters == sum(p.numel() for p in model.parameters())
    unused = TINY.num_layers * (TINY.num_experts - TINY.experts_per_token) * 3 * TINY.hidden_size * TINY.expert_size
    assert TINY.active_parameters == TINY.parameters - unused


def test_every_parameter_has_one_optimiser():
    model = tiny_model()
    ids = [id(p) for p in (*model.matrices(), *model.other_parameters())]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_experts_equal_a_loop_over_tokens():
    model = tiny_model()
    layer = model.layers[0].experts
    x = torch.randn(7, TINY.hidden_size)
    out, _, _, load = layer(x)
    expected = torch.zeros_like(x)
    counts = torch.zeros(TINY.num_experts)
    for t, row in enumerate(x):
        probabilities = (layer.router @ row).softmax(0)
        weights, chosen = probabilities.topk(TINY.experts_per_token)
        for w, e in zip(weights / weights.sum(), chosen, strict=True):
            act = torch.nn.functional.silu(layer.gate[e] @ row) * (layer.up[e] @ row)
            expected[t] += w * (layer.down[e].T @ act)
            counts[e] += 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(load, counts / counts.sum())


def test_grouped_experts_equal_dense_ones():
    dense, grouped = DemoModel(TINY, "dense"), DemoModel(TINY, "grouped")
    dense.load_state_dict(tiny_model().state_dict())
    grouped.load_state_dict(dense.state_dict())
    tokens = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(1))
    a, b = dense(tokens), grouped(tokens)
    assert float(a.cross_entropy) == pytest.approx(float(b.cross_entropy), rel=5e-3)
    a.cross_entropy.backward()
    b.cross_entropy.backward()
    for name in ("gate", "up", "down"):
        p, q = getattr(dense.layers[1].experts, name).grad, getattr(grouped.layers[1].experts, name).grad
        assert float((p - q).norm() / p.norm()) < 0.05


def test_muon_makes_matrices_orthogonal():
    for shape in ((3, 16, 48), (2, 48, 16)):
        matrices = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        values = torch.linalg.svdvals(matrices)
        assert matrices.shape == shape
        assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_muon_steps_stacks_and_matrices_alike():
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 8, 16, generator=generator))
    single = torch.nn.Parameter(stack.detach()[1].clone())
    gradient = torch.randn(3, 8, 16, generator=generator)
    for parameter, grad in ((stack, gradient), (single, gradient[1])):
        parameter.grad = grad.clone()
        Muon([parameter], lr=0.01, weight_decay=0.1).step()
    torch.testing.assert_close(stack.detach()[1], single.detach())


def test_mix_depends_on_the_step_alone_and_reads_everything_once_a_round():
    streams = {"a": torch.arange(1000, dtype=torch.int16), "b": torch.arange(2000, 2600, dtype=torch.int16)}
    first = TokenMix(streams, {"a": 0.75, "b": 0.25}, context=20, batch=4, seed=3)
    again = TokenMix(streams, {"a": 0.75, "b": 0.25}, context=20, batch=4, seed=3)
    batches = [first.batch(s) for s in range(16)]
    assert torch.equal(again.batch(9), batches[9])
    rows = torch.cat(batches)
    starts = rows[:, 0]
    assert int((starts < 2000).sum()) == 48
    assert len(set(starts[starts < 2000].tolist())) == 48
    assert torch.equal(rows, starts[:, None] + torch.arange(21))
    with pytest.raises(ValueError, match="fewer than two windows"):
        TokenMix(streams, {"b": 1.0}, context=400, batch=1, seed=0).batch(0)


def test_bits_per_byte_scores_every_token_once():
    ids = torch.arange(50)
    seen = []

    def losses(tokens):
        seen.append(tokens)
        return (tokens[:, 1:] + 1).double()

    for context, stride in ((16, 8), (64, 32), (16, 16), (10, 3)):
        value = bits_per_byte(losses, ids, 50, context=context, stride=stride, first=299)
        assert value == pytest.approx(sum(range(1, 51)) / torch.log(torch.tensor(2.0)).item() / 50)
    assert all(t[0, 0] == 299 for t in seen[:1])


def test_rate_warms_up_stays_and_falls_to_zero():
    rate = train_demo_moe.rate_factor
    assert rate(0.0) == 0.0
    assert rate(0.3) == rate(0.5) == 1.0
    assert rate(0.75) == pytest.approx(0.5)
    assert rate(1.0) == 0.0


def test_weights_survive_the_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.demo_moe.weights_file._PART_BYTES", 10_000)
    state = tiny_model().state_dict()
    write_weights(state, {"step": 7}, tmp_path)
    assert len(list(tmp_path.glob("weights.[0-9][0-9]"))) > 3
    read, about = read_weights(tmp_path)
    assert about == {"step": 7}
    assert all(torch.equal(read[n], t.bfloat16()) for n, t in state.items())
    (tmp_path / "weights.01").unlink()
    with pytest.raises(ValueError, match="are expected"):
        read_weights(tmp_path)


def test_spacing_of_tokenised_corpora():
    document = "History\n\nThe well-known ship (\"Hood\") cost $1,200.50, and didn't float. The U.S. Navy's end."
    assert text_pieces.wikitext_spacing(document) == (
        ' = History = \n The well @-@ known ship ( " Hood " ) cost $ 1 @,@ 200 @.@ 50 , '
        "and didn 't float . The U.S. Navy 's end . "
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Texts, tokenizer and token files, made with the scripts themselves."""
    work = tmp_path_factory.mktemp("demo")
    (work / "text").mkdir()
    (work / "heldout").mkdir()
    for name in ("prose", "guide", "reference", "code", "prose.validation"):
        (work / "text" / f"{name}.txt").write_text("\x00".join(f"{TEXT * 6}{name} {i}" for i in range(6)))
    (work / "heldout" / "book.txt").write_text(TEXT * 4)
    tokenizer = train_tokenizer.train(train_tokenizer.sample(work / "text"), 300)
    train_tokenizer.save(tokenizer, work / "tokenizer", 64)
    text_pieces.pack(work / "text", work / "heldout", work / "pieces", limit_mib=56)
    text_pieces.tokenise(work / "pieces" / "part1", work / "tokenizer" / "tokenizer.json", work / "tokens", jobs=2)
    return work


def test_tokenizer_and_token_files(tokens):
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 298
    assert tokenizer.decode(tokenizer.encode("Größe 123 \t\n").ids) == "Größe 123 \t\n"
    assert len(tokenizer.encode("1234").ids) == 4
    assert {p.name for p in (tokens / "tokens").glob("*.u16")} == {
        f"{n}.u16" for n in (*MIX, "prose.validation", "heldout-book")
    }
    assert int((tokens / "tokens" / "heldout-book.bytes").read_text()) == len((TEXT * 4).encode())


def test_pieces_hold_the_whole_text(tokens):
    piece = lzma.decompress((tokens / "pieces" / "part1" / "prose.000.xz").read_bytes()).decode()
    assert piece == (tokens / "text" / "prose.txt").read_text()


def train(tokens: Path, out: Path, monkeypatch, **options: str) -> None:
    monkeypatch.setattr(train_demo_moe, "_TINY", TINY)
    monkeypatch.setattr(train_demo_moe, "_EVALUATION_SECONDS", 1.0)
    monkeypatch.setattr(train_demo_moe, "_SYNC_EVERY", 2)
    # A clock that counts how often it is asked: as many steps on a busy machine as on an idle one.
    asked = itertools.count()
    monkeypatch.setattr(train_demo_moe, "time", SimpleNamespace(monotonic=lambda: 0.04 * next(asked)))
    words = [
        "--tiny",
        "--tokens",
        str(tokens / "tokens"),
        "--state",
        str(out.parent / "state.pt"),
        "--out",
        str(out),
        "--batch",
        "16",
        "--context",
        "32",
        "--minutes",
        "0.07",
        "--device",
        "cpu",
    ]
    for name, value in options.items():
        words += [f"--{name}"] + ([value] if value else [])
    train_demo_moe.Trainer(train_demo_moe.parse(words), 0.0).run()


def test_two_commands_train_one_model_and_export_it(tokens, tmp_path, monkeypatch, capsys):
    train(tokens, tmp_path / "one", monkeypatch, until="0.5")
    train(tokens, tmp_path / "two", monkeypatch, until="1", resume="")
    first, second = (read_weights(tmp_path / d)[1] for d in ("one", "two"))
    assert second["step"] > first["step"] > 0
    log = json.loads((tmp_path / "two" / "log.json").read_text())
    scores = [row["bits_per_byte"] for row in log if "bits_per_byte" in row]
    assert scores[-1]["heldout-book"] < scores[0]["heldout-book"] < 8
    with pytest.raises(SystemExit, match="give --resume"):
        train(tokens, tmp_path / "three", monkeypatch)

    words = [
        "export",
        "--weights",
        str(tmp_path / "two"),
        "--tokenizer",
        str(tokens / "tokenizer"),
        "--out",
        str(tmp_path / "fp8"),
    ]
    monkeypatch.setattr("sys.argv", words)
    export.main()
    assert "MB" in capsys.readouterr().out
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert export.logit_difference(DemoModelFrom(tmp_path / "two"), tmp_path / "fp8") < 0.1


def DemoModelFrom(folder: Path) -> DemoModel:  # noqa: N802
    state, about = read_weights(folder)
    model = DemoModel(DemoConfig(**about["config"]), compute_dtype=torch.float32)
    model.load_state_dict(state)
    return model


def test_transformers_computes_the_same_logits(tokens, tmp_path):
    model = tiny_model()
    state = {n: t.bfloat16().float() for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    export.write_folder(
        hugging_face_tensors(state, TINY), hugging_face_config(TINY, 298), tokens / "tokenizer", tmp_path
    )
    assert export.logit_difference(model, tmp_path) < 1e-5
    assert load_folder(tmp_path).config.num_experts == TINY.num_experts


def test_average_of_checkpoints():
    first, second = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 10.0])}
    assert average(first, second, 0.25)["a"].tolist() == [1.5, 4.0]
    with pytest.raises(ValueError, match=r"differ in \['b'\]"):
        average(first, {**second, "b": second["a"]}, 0.5)


def test_spaced_windows_reach_over_the_stream():
    windows = spaced_windows(torch.arange(1000, dtype=torch.int16), context=20, tokens=100)
    assert windows.shape == (5, 21)
    assert windows[:, 0].tolist() == [0, 199, 398, 597, 796]
    assert torch.equal(windows, windows[:, :1] + torch.arange(21))
    assert spaced_windows(torch.arange(1000), context=300, tokens=5000)[-1, -1] <= 999


def test_bits_per_token_is_the_mean_loss():
    model = tiny_model()
    windows = torch.randint(300, (3, 9), generator=torch.Generator().manual_seed(2))
    expected = float(model.token_losses(windows).mean()) / torch.tensor(2.0).log().item()
    assert bits_per_token(model, windows) == pytest.approx(expected, rel=1e-5)


def test_picture_of_the_routing(tmp_path, monkeypatch):
    chosen = torch.rand(3, 500, 8, generator=torch.Generator().manual_seed(0)).topk(2, dim=-1).indices
    (tmp_path / "results.json").write_text(json.dumps({"fp8": {"routing": routing_statistics(chosen, 8, seed=0)}}))
    words = ["plot", "--results", str(tmp_path / "results.json"), "--folder", "fp8"]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path / "routing.png")])
    plot_routing.main()
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_with_a_path_or_too_many_bytes_does_not_ship(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"_name_or_path": "/home/someone/model"}')
    with pytest.raises(ValueError, match="names a path"):
        export.check_folder(tmp_path)
    monkeypatch.setattr(export, "SIZE_LIMIT", 10)
    with pytest.raises(ValueError, match="may ship"):
        export.check_folder(tmp_path)


def test_routing_statistics_of_a_uniform_router():
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(3, 20_000, 8, generator=generator).topk(2, dim=-1).indices
    result = routing_statistics(chosen, 8, seed=0)
    assert result["least_share_of_tokens"] == pytest.approx(0.25, abs=0.01)
    for batch, expected in result["distinct_if_uniform"].items():
        assert result["distinct_experts_per_layer"][batch] == pytest.approx(expected, rel=0.03)
