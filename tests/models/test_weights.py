from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.models.tiny_models import CASES, CPU, MemoryCheckpoint, build, decoder_of, ragged_inputs, random_tokens

from subten.errors import CheckpointError
from subten.models import count_parameters, load_weights, spec_from_config


@pytest.fixture
def in_memory(tmp_path):
    """What transformers stores of a tiny model, as a checkpoint in memory."""

    def read(case):
        build(case).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        return MemoryCheckpoint(config, load_file(tmp_path / "model.safetensors"), loaded=[])

    return read


def load(checkpoint, **options):
    spec = spec_from_config(checkpoint.config)
    return load_weights(checkpoint, spec, dtype=torch.float32, device=CPU, **options)


def logits(checkpoint):
    decoder = decoder_of(checkpoint)
    return decoder.logits(decoder.forward(ragged_inputs([random_tokens(9)]), None))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read_exactly_once(case, in_memory):
    checkpoint = in_memory(case)
    load(checkpoint)
    assert sorted(checkpoint.loaded) == sorted(checkpoint.tensors)


@pytest.mark.parametrize("case", CASES)
def test_parameter_count_equals_transformers(case):
    model = build(case)
    count = count_parameters(spec_from_config(json.loads(model.config.to_json_string())))
    assert count.total == model.num_parameters()
    assert (count.active < count.total) == ("moe" in case or "mixtral" in case)


def test_parameter_count_of_mixtral_8x7b_is_the_published_one():
    spec = spec_from_config(
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32_768,
        }
    )
    count = count_parameters(spec)
    assert count.total == 46_702_792_704
    # Mistral AI states 12.9 billion.
    assert count.active == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14_336 == 12_879_925_248


def test_progress_counts_tensors_up_to_the_total(in_memory):
    checkpoint = in_memory("mixtral")
    calls = []
    load(checkpoint, progress=lambda done, total: calls.append((done, total)))
    total = len(checkpoint.tensors)
    assert calls == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_dtype_asked_for(dtype, in_memory):
    checkpoint = in_memory("qwen2_moe")
    weights = load_weights(checkpoint, spec_from_config(checkpoint.config), dtype=dtype, device=CPU)
    block = weights.layers[1].feed_forward
    for tensor in (weights.embedding, weights.layers[0].attention.qkv.bias, block.gate_up, block.shared.gate):
        assert tensor.dtype == dtype
    expert = checkpoint.tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    assert torch.equal(block.gate_up[4, 20:], expert.to(dtype))


def test_old_rotary_buffers_are_ignored(in_memory):
    checkpoint = in_memory("llama")
    expected = logits(checkpoint)
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert torch.equal(logits(checkpoint), expected)


def test_a_stored_copy_of_the_tied_embedding_is_shared(in_memory):
    checkpoint = in_memory("qwen2-tied")
    expected = logits(checkpoint)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].clone()
    weights = load(checkpoint)
    assert weights.output.weight is weights.embedding
    assert torch.equal(logits(checkpoint), expected)


def test_a_stored_output_that_differs_from_the_tied_embedding_is_used(in_memory):
    checkpoint = in_memory("qwen2-tied")
    tied = logits(checkpoint)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"] * 2
    torch.testing.assert_close(logits(checkpoint), tied * 2)


def test_missing_tensors_are_named_and_counted(in_memory):
    checkpoint = in_memory("llama")
    del checkpoint.tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"tiny-model does not .*: it lacks 1 tensor \(model.norm.weight\)"):
        load(checkpoint)
    for layer in range(3):
        for name in ("q", "k"):
            del checkpoint.tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    few = r"lacks 7 tensors \(model.layers.0.self_attn.k_proj.weight, [a-z_.0-9]*, [a-z_.0-9]*, \.\.\.\)$"
    with pytest.raises(CheckpointError, match=few):
        load(checkpoint)
    assert checkpoint.loaded == []


def test_left_over_tensors_are_named_and_counted(in_memory):
    checkpoint = in_memory("llama")
    checkpoint.tensors["model.layers.3.input_layernorm.weight"] = torch.ones(48)
    message = r"it has 1 tensor \(model.layers.3.input_layernorm.weight\) too many$"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)
    del checkpoint.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"it lacks 1 tensor \(lm_head.weight\) and has 1 tensor \("):
        load(checkpoint)
    assert checkpoint.loaded == []


@pytest.mark.parametrize(
    ("case", "name", "shape", "expected"),
    [
        ("llama", "model.embed_tokens.weight", (130, 48), [131, 48]),
        ("llama", "model.layers.2.self_attn.q_proj.weight", (48, 47), [48, 48]),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight", (41, 48), [40, 48]),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", (15,), [16]),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight", (6, 40, 96), [6, 80, 48]),
        ("llama", "model.norm.weight", (1, 48), [48]),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(case, name, shape, expected, in_memory):
    checkpoint = in_memory(case)
    checkpoint.tensors[name] = torch.ones(shape)
    with pytest.raises(CheckpointError) as refusal:
        load(checkpoint)
    assert str(refusal.value) == (
        f"tiny-model: tensor {name} has shape {list(shape)}, but the configuration asks for {expected}"
    )
    assert checkpoint.loaded == []
