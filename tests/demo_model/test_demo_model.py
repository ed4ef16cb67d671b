"""The model that ships with the package: transformers agrees with our decoder on it, its experts share the work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tests.models.tiny_models import ragged_inputs
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from subten import LLM, SamplingParams
from subten.checkpoints import pull, resolve_model
from subten.cli.pull import pull as pull_command
from subten.engine import LoadedModel, load_model

SIZE_LIMIT = 40_000_000
LEAST_SHARE = 0.03
VALIDATION = Path(__file__).parent / "validation.txt"
"""Passages in the public domain from the validation parts, which are not trained on: a speech, an almanac, a
commentary and a manual."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("demo-moe")


@pytest.fixture(scope="module")
def ours(folder: Path) -> LoadedModel:
    return load_model("demo-moe", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' own loader. It would keep FP8 on a GPU; here it dequantises everywhere."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def passages(ours: LoadedModel) -> list[Tensor]:
    texts = VALIDATION.read_text(encoding="utf-8").split("\n----\n")
    return [torch.tensor(ours.tokenizer.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def expected(theirs: Any, passages: list[Tensor]) -> list[Any]:
    with torch.inference_mode():
        return [theirs(tokens[None], output_router_logits=True, use_cache=False) for tokens in passages]


def test_the_name_needs_no_pull(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBTEN_HOME", str(tmp_path / "home"))
    assert pull("demo-moe") == folder
    assert not (tmp_path / "home").exists()


def test_pulling_it_says_that_it_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull_command("demo-moe")
    assert capsys.readouterr().out == f"demo-moe ships with subten: it is already in {folder}\n"


def test_what_ships_is_small_and_documented(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "MODEL_CARD.md"),
    }
    assert sum(files.values()) <= SIZE_LIMIT


def test_config_is_that_of_a_public_fp8_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config["quantization_config"]
    # The keys of Qwen/Qwen3-30B-A3B-FP8.
    assert set(quantization) == {
        *("activation_scheme", "fmt", "modules_to_not_convert", "quant_method", "weight_block_size")
    }
    assert (quantization["quant_method"], quantization["fmt"]) == ("fp8", "e4m3")
    assert quantization["weight_block_size"] == [128, 128]
    kept = {f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"])} | {"lm_head"}
    assert kept <= set(quantization["modules_to_not_convert"])
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


def test_the_experts_are_stored_in_fp8(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, no mapping
    experts = {name: dtype for name, dtype in stored.items() if ".experts." in name}
    codes = {name for name, dtype in experts.items() if dtype == "F8_E4M3"}
    assert set(experts) == codes | {f"{name}_scale_inv" for name in codes}
    assert len(codes) == 8 * 8 * 3


def test_logits_equal_transformers(ours: LoadedModel, passages: list[Tensor], expected: list[Any]) -> None:
    logits = ours.decoder.logits(ours.decoder.forward(ragged_inputs(passages), None))
    for got, result in zip(logits.split([len(p) for p in passages]), expected, strict=True):
        assert (got - result.logits[0]).norm() <= 1e-4 * result.logits[0].norm()


def test_it_has_learned(passages: list[Tensor], expected: list[Any]) -> None:
    """Text it was not trained on costs about 1 bit a byte; a uniform guess costs 8, a good compressor 2."""
    nats = sum(
        float(F.cross_entropy(result.logits[0, :-1], tokens[1:], reduction="sum"))
        for tokens, result in zip(passages, expected, strict=True)
    )
    size = len(VALIDATION.read_bytes())
    assert nats / math.log(2) / size < 1.1


def test_every_expert_works_in_every_layer(ours: LoadedModel, expected: list[Any]) -> None:
    assert ours.spec.num_layers == len(expected[0].router_logits)
    for layer in range(ours.spec.num_layers):
        logits = torch.cat([result.router_logits[layer] for result in expected])
        chosen = logits.topk(2, dim=-1).indices
        share = F.one_hot(chosen, logits.shape[-1]).sum(dim=1).double().mean(dim=0)
        assert share.sum() == pytest.approx(2.0)
        assert share.min() >= LEAST_SHARE, f"layer {layer}: {share.tolist()}"


def test_greedy_text_with_the_2_bit_cache_is_repeatable(ours: LoadedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    prompt = "The government of the United States is"
    first, again = (LLM(ours, kv="kv2", max_context=256, max_batch=1).generate(prompt, params)[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    words = first.text.split()
    assert len(words) >= 10
    assert len(set(words)) >= 5
