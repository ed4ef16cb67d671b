"""Folders of safetensors: whole, sharded, in every float type, quantised to FP8."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import CASES, save_folder, tiny_model
from tiny_tokenizers import TEXT, train
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subten.checkpoints import fp8, open_checkpoint
from subten.errors import CheckpointError, UnknownArchitectureError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def make_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_reads_what_transformers_saved(case: str, root: Path) -> None:
    folder = save_folder(case, root)
    checkpoint = open_checkpoint(folder)
    expected = load_file(folder / "model.safetensors")
    assert checkpoint.names() == expected.keys()
    assert checkpoint.config == json.loads((folder / "config.json").read_text())
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.load(name), tensor)


def test_shards_read_as_one_model(root: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(save_folder("qwen3moe", root))
    tiny_model("qwen3moe").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    sharded = open_checkpoint(tmp_path)
    assert sharded.names() == whole.names()
    assert all(torch.equal(sharded.load(name), whole.load(name)) for name in whole.names())
    assert sharded.fingerprint == whole.fingerprint


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_float_types(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 7).to(stored)
    loaded = open_checkpoint(make_folder(tmp_path, {"x": values, "empty": values[:0]})).load("x", wanted)
    assert loaded.dtype == wanted
    assert torch.equal(loaded, values.to(wanted))


def test_a_file_of_any_name_will_do_where_it_is_the_only_one(tmp_path: Path) -> None:
    make_folder(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert open_checkpoint(tmp_path).names() == {"x"}
    save_file({"y": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, {"x": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="holds no tensor y"):
        checkpoint.load("y")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, {"x": torch.ones(2, dtype=torch.int64)}))
    with pytest.raises(CheckpointError, match="tensor x has type I64"):
        checkpoint.load("x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, {"x": torch.tensor([0.0, value])}))
    with pytest.raises(CheckpointError, match="tensor x holds NaN or infinite values"):
        checkpoint.load("x")


def test_values_that_the_type_asked_for_cannot_hold(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, {"x": torch.tensor([1e5])}))
    assert checkpoint.load("x", torch.bfloat16).isfinite().all()
    with pytest.raises(CheckpointError, match=r"beyond the range of torch.float16; load it as bfloat16"):
        checkpoint.load("x", torch.float16)


def test_fingerprint_depends_on_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    variants = [
        {"x": torch.zeros(4, 600), "y": torch.zeros(4)},
        {"x": torch.zeros(4, 600), "z": torch.zeros(4)},
        {"x": torch.zeros(600, 4), "y": torch.zeros(4)},
        {"x": torch.zeros(4, 600), "y": torch.zeros(8, dtype=torch.float16)},
        {"x": torch.eye(4, 600), "y": torch.zeros(4)},
        {"x": torch.zeros(4, 600), "y": torch.ones(4)},
    ]
    prints = [
        open_checkpoint(make_folder(tmp_path / f"{index}", tensors)).fingerprint
        for index, tensors in enumerate(variants)
    ]
    assert len(set(prints)) == len(variants)
    assert all(len(bytes.fromhex(value)) == 32 for value in prints)


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 5), (3, 200, 130)], ids=str)
@pytest.mark.parametrize("layout", ["blocks", "channels", "channels-flat"])
def test_fp8_weights_are_scaled(shape: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    weight = torch.randn(shape) * torch.rand(*shape[:-1], 1)
    codes, scale = fp8.quantise_blocks(weight) if layout == "blocks" else fp8.quantise_channels(weight)
    suffix = "weight_scale_inv" if layout == "blocks" else "weight_scale"
    tensors = {
        "a.weight": codes,
        f"a.{suffix}": scale.squeeze(-1) if layout == "channels-flat" else scale,
        "a.input_scale": torch.ones(1),
        "b.weight": torch.ones(3),
    }
    quantisation = {"quant_method": "fp8" if layout == "blocks" else "compressed-tensors"}
    checkpoint = open_checkpoint(make_folder(tmp_path, tensors, {"quantization_config": quantisation}))
    assert checkpoint.names() == {"a.weight", "b.weight"}
    assert checkpoint.shape("a.weight") == shape
    expected = fp8.dequantise_blocks(codes, scale) if layout == "blocks" else codes.float() * scale
    assert torch.equal(checkpoint.load("a.weight"), expected)
    assert torch.allclose(expected, weight, rtol=2**-4, atol=float(weight.abs().max()) * 2**-9)


def test_fp8_block_size_of_the_config(tmp_path: Path) -> None:
    codes, scale = fp8.quantise_blocks(torch.randn(48, 33), (16, 32))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]}}
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    checkpoint = open_checkpoint(make_folder(tmp_path, tensors, config))
    assert torch.equal(checkpoint.load("experts.gate_up_proj"), fp8.dequantise_blocks(codes, scale, (16, 32)))


def test_fp8_with_one_scale_for_all(tmp_path: Path) -> None:
    codes = torch.randn(6, 4).to(fp8.E4M3)
    for index, scale in enumerate((torch.tensor(0.5), torch.tensor([0.5]))):
        folder = make_folder(tmp_path / f"{index}", {"a.weight": codes, "a.weight_scale": scale})
        assert torch.equal(open_checkpoint(folder).load("a.weight"), codes.float() * 0.5)


@pytest.mark.parametrize("place", [0, 100, 319])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_fp8_nan_is_found(place: int, nan: int, tmp_path: Path) -> None:
    codes = torch.randn(5, 64).to(fp8.E4M3)
    codes.view(torch.uint8).view(-1)[place] = nan
    checkpoint = open_checkpoint(make_folder(tmp_path, {"a.weight": codes, "a.weight_scale": torch.ones(5, 1)}))
    for load in (checkpoint.load, checkpoint.load_fp8):
        with pytest.raises(CheckpointError, match=r"tensor a.weight holds NaN"):
            load("a.weight")


def test_every_code_of_fp8_but_nan_is_taken(tmp_path: Path) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).view(2, -1)
    tensors = {"a.weight": codes.view(fp8.E4M3), "a.weight_scale": torch.ones(2, 1)}
    found, _ = open_checkpoint(make_folder(tmp_path, tensors)).load_fp8("a.weight")
    assert torch.equal(found.view(torch.uint8), codes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fp8_with_a_scale_that_is_none_is_refused(value: float, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(3, 8).to(fp8.E4M3), "a.weight_scale": torch.tensor([[1.0], [value], [2.0]])}
    checkpoint = open_checkpoint(make_folder(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"tensor a.weight_scale holds NaN or infinite values"):
        checkpoint.load_fp8("a.weight")
    with pytest.raises(CheckpointError, match=r"tensor a.weight holds NaN or infinite values"):
        checkpoint.load("a.weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_none_is_found(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    for place in (0, 500, 1022):
        values = torch.randn(1023).to(dtype)
        values[place] = value
        folder = make_folder(tmp_path / str(place), {"a.weight": values})
        with pytest.raises(CheckpointError, match=r"tensor a.weight holds NaN or infinite values"):
            open_checkpoint(folder).load("a.weight", dtype)


class _Made(TorchDispatchMode):
    """Keeps all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.tensors += [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        return made


def test_looking_for_nan_makes_no_second_tensor(tmp_path: Path) -> None:
    codes = torch.randn(100, 64).to(fp8.E4M3)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(100, 1), "b.weight": torch.ones(6400)}
    checkpoint = open_checkpoint(make_folder(tmp_path, tensors))
    with _Made() as made:
        held = {checkpoint.load_fp8("a.weight")[0].untyped_storage().data_ptr()}
        held.add(checkpoint.load("b.weight").untyped_storage().data_ptr())
    large = {one.untyped_storage().data_ptr() for one in made.tensors if one.numel() >= 6400}
    assert large <= held


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("layout", ["blocks", "channels", "channels-flat", "one"])
def test_fp8_as_it_is_stored(layout: str, leading: tuple[int, ...], tmp_path: Path) -> None:
    weight = torch.randn(*leading, 200, 130)
    codes, scale = fp8.quantise_blocks(weight) if layout == "blocks" else fp8.quantise_channels(weight)
    stored = {"blocks": scale, "channels": scale, "channels-flat": scale[..., 0], "one": torch.tensor(0.5)}[layout]
    suffix = "weight_scale_inv" if layout == "blocks" else "weight_scale"
    checkpoint = open_checkpoint(make_folder(tmp_path, {"a.weight": codes, f"a.{suffix}": stored}))
    assert checkpoint.fp8_scales("a.weight") == ("block" if layout == "blocks" else "channel")
    found, factors = checkpoint.load_fp8("a.weight")
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    expected = {"blocks": scale, "one": torch.full(weight.shape[:-1], 0.5)}.get(layout, scale[..., 0])
    assert torch.equal(factors, expected)


def test_fp8_of_one_output_channel(tmp_path: Path) -> None:
    codes, scale = fp8.quantise_channels(torch.randn(1, 8))
    folder = make_folder(tmp_path, {"a.weight": codes, "a.weight_scale": scale})
    assert torch.equal(open_checkpoint(folder).load_fp8("a.weight")[1], scale[0])


def test_what_is_not_fp8_or_has_other_blocks_is_not_kept(tmp_path: Path) -> None:
    codes, scale = fp8.quantise_blocks(torch.randn(48, 33), (16, 32))
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale, "b.weight": torch.ones(3, 3)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]}}
    checkpoint = open_checkpoint(make_folder(tmp_path, tensors, config))
    for name in ("a.weight", "b.weight"):
        assert checkpoint.fp8_scales(name) is None
        with pytest.raises(CheckpointError, match=f"holds no tensor {name} in FP8"):
            checkpoint.load_fp8(name)


@pytest.mark.parametrize(
    ("scale_name", "scale_shape", "message"),
    [
        ("b.weight_scale", (4, 1), "FP8 tensor a.weight has no scale; expected a.weight_scale or a.weight_scale_inv"),
        ("a.weight_scale", (3, 1), r"of shape \[3, 1\] does not fit a.weight of shape \[4, 8\] \(one scale per out"),
        ("a.weight_scale", (8,), "does not fit"),
        ("a.weight_scale_inv", (4, 1), r"\(blocks of 128x128\)"),
    ],
)
def test_fp8_scale_missing_or_of_the_wrong_shape(
    scale_name: str, scale_shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, {"a.weight": torch.ones(4, 8).to(fp8.E4M3), scale_name: torch.ones(scale_shape)})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("quantisation", [{"quant_method": "awq", "bits": 4}, {}, "fp8"])
def test_other_quantisation_is_refused(quantisation: object, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"quantization_config": quantisation})
    with pytest.raises(UnknownArchitectureError, match="supported are FP8 weights"):
        open_checkpoint(folder)


@pytest.mark.parametrize("block", [[128], [0, 128], "128x128"])
def test_block_size_that_is_none(block: object, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    with pytest.raises(CheckpointError, match="expected two positive integers"):
        open_checkpoint(make_folder(tmp_path, {"x": torch.ones(2)}, config))


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_tokenizer_json_counts_more_than_the_class_named(named: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"model_type": "llama"})
    original = Tokenizer.from_str(train("gpt-2").to_str())
    assert len(original.encode("10000000000").ids) < 11
    original.pre_tokenizer = train("smollm").pre_tokenizer
    original.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": named, "bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": "hi"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("10000000000")) == list("10000000000")
    for text in TEXT:
        assert tokenizer.encode(text) == original.encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == "hi"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', "\n{}"])
def test_damaged_tokenizer_is_one_line(text: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"model_type": "llama"})
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* can't be loaded: .+") as caught:
        open_checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_missing_tokenizer_is_one_line(kind: str, tmp_path: Path) -> None:
    """Of some kinds of model transformers makes a tokenizer out of nothing, which knows no word."""
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"model_type": kind})
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* can't be loaded") as caught:
        open_checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_words_is_one_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"model_type": "llama"})
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(CheckpointError, match="has no vocabulary"):
        open_checkpoint(folder).tokenizer()


def test_a_setting_of_the_tokenizer_that_makes_no_sense_is_one_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"x": torch.ones(2)}, {"model_type": "llama"})
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str())
    open_checkpoint(folder).tokenizer()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": "long"}')
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* can't be loaded: "):
        open_checkpoint(folder).tokenizer()
