"""A GGUF file gives the same tensors and the same model as the folder it was converted from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from saved_models import CASES, VOCAB_SIZE, save_folder, tiny_model

from subten.checkpoints import OWN_PREFIX, gguf_tensors, open_checkpoint
from subten.checkpoints.gguf_header import can_dequantise, read_gguf_header
from subten.checkpoints.stored import StoredTensor
from subten.errors import CheckpointError, ModelNotFoundError, UnknownArchitectureError

TYPES = [kind for kind in gguf.GGMLQuantizationType if can_dequantise(kind)]
# What the synthesised config need not repeat: notes to transformers, training, and names of the same thing.
NOT_COMPARED = {
    "dtype", "transformers_version", "initializer_range", "attention_dropout", "router_aux_loss_coef", "pad_token_id",
    "use_cache", "pretraining_tp", "max_window_layers", "head_dim", "output_router_logits", "sliding_window",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(root: Path) -> Path:
    return save_folder("llama", root)


@pytest.mark.parametrize("case", CASES)
def test_same_names_shapes_and_values_as_the_folder(case: str, root: Path, tmp_path: Path) -> None:
    folder = save_folder(case, root)
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf"))
    expected = load_file(folder / "model.safetensors")
    assert checkpoint.names() == expected.keys()
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape), name
        assert torch.equal(checkpoint.load(name), tensor), name


@pytest.mark.parametrize("case", CASES)
def test_transformers_runs_the_same_model_from_the_synthesised_config(case: str, root: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(save_folder(case, root), tmp_path / "model.gguf"))
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    original = tiny_model(case)
    wanted = original.config.to_dict()
    got = config.to_dict()
    assert {key: got[key] for key in wanted if key not in NOT_COMPARED} == {
        key: wanted[key] for key in wanted if key not in NOT_COMPARED
    }

    config.save_pretrained(tmp_path / "copy")
    save_file(
        {name: checkpoint.load(name) for name in checkpoint.names()},
        tmp_path / "copy" / "model.safetensors",
        metadata={"format": "pt"},
    )
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    tokens = torch.arange(24).view(2, 12) * 7 % VOCAB_SIZE
    with torch.no_grad():
        assert torch.equal(copy(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_tensor_type(kind: gguf.GGMLQuantizationType, root: Path, tmp_path: Path) -> None:
    columns = 768
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c make small finite numbers of every kind of scale.
    raw = np.random.default_rng(0).integers(0, 0x3C, (32, columns // block_elements * block_bytes), dtype=np.uint8)
    path = write_gguf(
        save_folder("llama", root), tmp_path / "model.gguf", override={"blk.0.ffn_down.weight": (raw, kind)}
    )
    expected = gguf.dequantize(raw, kind)
    name = "model.layers.0.mlp.down_proj.weight"
    values = open_checkpoint(path).load(name)
    assert values.shape == (32, columns)
    assert np.array_equal(values.numpy(), expected)


def test_chunks_join_without_a_seam(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(save_folder("qwen3moe", root), tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType.BF16)
    checkpoint = open_checkpoint(path)
    whole = {name: checkpoint.load(name) for name in checkpoint.names()}
    monkeypatch.setattr(gguf_tensors, "CHUNK_ELEMENTS", 96)
    for name, tensor in whole.items():
        assert torch.equal(checkpoint.load(name), tensor), name


def test_an_expert_is_read_without_the_others(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_gguf(save_folder("mixtral", root), tmp_path / "model.gguf"))
    sizes: list[int] = []
    read = StoredTensor.read

    def counted(self: StoredTensor, start: int = 0, nbytes: int | None = None) -> bytearray:
        data = read(self, start, nbytes)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(StoredTensor, "read", counted)
    values = checkpoint.load("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    assert sum(sizes) == values.nbytes


def test_loads_in_the_type_asked_for(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(llama, tmp_path / "model.gguf"))
    values = checkpoint.load("model.norm.weight", torch.bfloat16)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, checkpoint.load("model.norm.weight").to(torch.bfloat16))


def test_folder_with_one_gguf_file_opens(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).names() == open_checkpoint(llama).names()


def test_a_calibration_beside_the_weights_is_not_taken_for_weights(llama: Path, tmp_path: Path) -> None:
    save_file({"mean_key": torch.zeros(1)}, tmp_path / f"{OWN_PREFIX}calibration.safetensors")
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor a GGUF file"):
        open_checkpoint(tmp_path)
    write_gguf(llama, tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "model.gguf"


def test_old_llama_cpp_reader_agrees_on_the_header(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType.F16)
    header = read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == list(header.tensors)
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.nbytes, ours.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
    for key, value in header.metadata.items():
        assert reader.fields[key].contents() == value


def test_fingerprint_changes_with_the_weights_only(root: Path, tmp_path: Path) -> None:
    folder = save_folder("llama", root)
    first = open_checkpoint(write_gguf(folder, tmp_path / "a.gguf")).fingerprint
    assert open_checkpoint(write_gguf(folder, tmp_path / "b.gguf")).fingerprint == first
    changed = {"output_norm.weight": np.zeros(32, np.float32)}
    assert open_checkpoint(write_gguf(folder, tmp_path / "c.gguf", override=changed)).fingerprint != first


def _write_plain(path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MINIMAL = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
MINIMAL_TENSORS = {
    "token_embd.weight": np.ones((16, 8), np.float32),
    "blk.0.attn_q.weight": np.ones((8, 8), np.float32),
}


@pytest.mark.parametrize(
    ("metadata", "tensors", "error", "message"),
    [
        ({}, {}, None, ""),
        ({"llama.block_count": 0}, {}, CheckpointError, "llama.block_count is 0, expected a positive integer"),
        ({"llama.block_count": 3}, {}, CheckpointError, "metadata say 3 layers, the tensors are of 1"),
        ({"llama.attention.head_count_kv": [1, 2]}, {}, UnknownArchitectureError, "differs between layers"),
        ({"llama.rope.freq_base": float("nan")}, {}, CheckpointError, "expected a positive number"),
        ({"llama.rope.dimension_count": 2}, {}, UnknownArchitectureError, "head dimension is 4"),
        ({"llama.rope.scaling.type": "longrope"}, {}, UnknownArchitectureError, "RoPE scaling 'longrope'"),
        ({"llama.attention.sliding_window": 16}, {}, UnknownArchitectureError, "sliding-window"),
        ({"llama.expert_count": 2}, {}, CheckpointError, "llama.expert_used_count is None"),
        ({"split.count": 3}, {}, UnknownArchitectureError, "one of 3 parts"),
        ({"tokenizer.ggml.eos_token_id": 99}, {}, CheckpointError, "expected a token below 16"),
        ({}, {"blk.0.ssm_a.weight": np.ones(8, np.float32)}, UnknownArchitectureError, "blk.0.ssm_a.weight is not"),
        ({}, {"rope_freqs.weight": np.array([1.0, 7.0], np.float32)}, UnknownArchitectureError, "llama3 scaling"),
        ({}, {"blk.0.attn_k.weight": np.ones((6, 8), np.float32)}, CheckpointError, "6 rows, which 2 heads"),
    ],
)
def test_metadata_that_cannot_be_used(
    metadata: dict[str, object],
    tensors: dict[str, np.ndarray],
    error: type[Exception] | None,
    message: str,
    tmp_path: Path,
) -> None:
    path = _write_plain(tmp_path / "model.gguf", MINIMAL | metadata, MINIMAL_TENSORS | tensors)
    if error is None:
        assert open_checkpoint(path).config["head_dim"] == 4
        return
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnknownArchitectureError, match="'mamba' is not supported; supported are llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_experts_that_contradict_the_metadata(root: Path, tmp_path: Path) -> None:
    wrong = {"blk.1.ffn_up_exps.weight": np.ones((3, 48, 32), np.float32)}
    path = write_gguf(save_folder("mixtral", root), tmp_path / "model.gguf", override=wrong)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up_exps.weight has shape \[3, 48, 32\], expected \[4, out"):
        open_checkpoint(path)
