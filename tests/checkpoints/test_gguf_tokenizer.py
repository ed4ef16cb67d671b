"""The tokenizer rebuilt from GGUF metadata encodes as the one the metadata were written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_models import VOCAB_SIZE
from tiny_tokenizers import NFC, PRE_TOKENIZERS, TEXT, add_byte_level_bpe, train

from subten.checkpoints.gguf_header import read_gguf_header
from subten.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from subten.errors import CheckpointError, UnknownArchitectureError

UNICODE = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aZ09 \n\t\r'.,é漢🙂\u0301")), max_size=60
)


def metadata_of(path: Path, *write: Callable[[gguf.GGUFWriter], None]) -> dict[str, Any]:
    writer = gguf.GGUFWriter(path, "llama")
    for add in write:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf_header(path).metadata


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tokenizers") / "model.gguf"
    return {
        pre: tokenizer_from_gguf(path, metadata_of(path, add_byte_level_bpe(pre)) | OFF, VOCAB_SIZE)
        for pre in PRE_TOKENIZERS
    }


OFF = {"tokenizer.ggml.add_bos_token": False}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=UNICODE | st.sampled_from(TEXT))
def test_encodes_as_the_original(pre: str, text: str, tokenizers: dict[str, Any]) -> None:
    assert tokenizers[pre].encode(text) == train(pre).encode(text).ids


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - NFC))
@given(text=UNICODE)
def test_decoding_gives_the_text_back(pre: str, text: str, tokenizers: dict[str, Any]) -> None:
    assert tokenizers[pre].decode(tokenizers[pre].encode(text)) == text


def test_digits_of_smollm_are_single(tokenizers: dict[str, Any]) -> None:
    smollm = tokenizers["smollm"]
    assert smollm.convert_ids_to_tokens(smollm.encode("10000000000")) == list("10000000000")
    gpt2 = tokenizers["gpt-2"]
    assert len(gpt2.encode("10000000000")) < 11


def test_control_and_user_tokens(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["smollm"]
    ids = tokenizer.encode("<|bos|>a<tool>b<|eos|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|bos|>", "a", "<tool>", "b", "<|eos|>"]
    assert tokenizer.decode(ids) == "<|bos|>a<tool>b<|eos|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert len(tokenizer) == VOCAB_SIZE


def test_roles_and_chat_template(tmp_path: Path) -> None:
    def roles(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)

    metadata = metadata_of(tmp_path / "model.gguf", add_byte_level_bpe("smollm"), roles)
    tokenizer = tokenizer_from_gguf(tmp_path, metadata, VOCAB_SIZE)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|bos|>hi<|eos|>"


@pytest.mark.parametrize(
    ("pre", "flags", "first", "last"),
    [
        ("smollm", {}, "a", "b"),
        ("smollm", {"add_bos_token": True}, "<|bos|>", "b"),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, "<|bos|>", "<|eos|>"),
        ("llama-bpe", {}, "<|bos|>", "b"),
        ("llama-bpe", {"add_bos_token": False}, "a", "b"),
    ],
)
def test_begin_and_end_of_sequence(pre: str, flags: dict[str, bool], first: str, last: str, tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path / "model.gguf", add_byte_level_bpe(pre))
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tokenizer = tokenizer_from_gguf(tmp_path, metadata, VOCAB_SIZE)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("a b"))
    assert tokens[0] == first
    assert tokens[-1].lstrip("Ġ") == last
    plain = tokenizer.convert_ids_to_tokens(tokenizer.encode("a b", add_special_tokens=False))
    assert (plain[0], plain[-1].lstrip("Ġ")) == ("a", "b")


# ---- SentencePiece


RECORDED = json.loads(Path(__file__).with_name("sentencepiece_model.json").read_text())
EXPECTED = RECORDED["expected"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *RECORDED["pieces"]]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) - 259)]
TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259)


def sentencepiece_metadata() -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {
        f"{prefix}model": "llama",
        f"{prefix}tokens": PIECES,
        f"{prefix}scores": SCORES,
        f"{prefix}token_type": TYPES,
        f"{prefix}bos_token_id": 1,
        f"{prefix}eos_token_id": 2,
        f"{prefix}unknown_token_id": 0,
    }


@pytest.mark.parametrize("text", EXPECTED)
def test_encodes_as_sentencepiece(text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(tmp_path, sentencepiece_metadata(), len(PIECES))
    assert tokenizer.encode(text, add_special_tokens=False) == EXPECTED[text]
    assert tokenizer.encode(text) == [1, *EXPECTED[text]]
    assert tokenizer.decode(EXPECTED[text]) == text


def test_sentencepiece_without_the_space_before_the_text(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(tmp_path, metadata, len(PIECES))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the", add_special_tokens=False))[0] != "▁the"
    assert tokenizer.decode(tokenizer.encode(" the the", add_special_tokens=False)) == " the the"


# ---- metadata that can't be used

COLON = train("smollm").token_to_id(":")  # what the template language of `tokenizers` can't express


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": None}, CheckpointError, "holds no tokenizer"),
        ({"model": "t5"}, UnknownArchitectureError, "model 't5' is not supported; supported are gpt2 .* and llama"),
        ({"pre": "kimi-k2"}, UnknownArchitectureError, "pre-tokenizer 'kimi-k2' is not supported; supported are def"),
        ({"pre": ["smollm"]}, UnknownArchitectureError, "pre-tokenizer"),
        ({"tokens": None}, CheckpointError, "tokens is no list of str"),
        ({"tokens": ["a", 1]}, CheckpointError, "tokens is no list of str"),
        ({"tokens": ["a"] * 320}, CheckpointError, "319 of tokenizer.ggml.tokens occur twice"),
        ({"tokens": [f"{i}" for i in range(321)]}, CheckpointError, "has 321 tokens and only 320 embeddings"),
        ({"token_type": [1]}, CheckpointError, "token_type has 1 entries for 320 tokens"),
        ({"merges": ["ab"]}, CheckpointError, "merge 'ab' is not of two tokens that form a third"),
        ({"merges": ["a 漢"]}, CheckpointError, "merge 'a 漢' is not of two tokens"),
        ({"bos_token_id": 320}, CheckpointError, "bos_token_id is 320, expected a token below 320"),
        ({"eos_token_id": -1}, CheckpointError, "eos_token_id is -1"),
        ({"add_bos_token": True}, CheckpointError, "adds a bos_token and does not say which"),
        ({"add_bos_token": True, "bos_token_id": COLON}, CheckpointError, "can't begin or end a sequence"),
        ({"chat_template": 3}, CheckpointError, "chat_template is no string"),
        ({"model": "llama", "scores": [0.0]}, CheckpointError, "scores has 1 entries"),
        ({"model": "llama", "remove_extra_whitespaces": True}, UnknownArchitectureError, "removes white space"),
    ],
)
def test_metadata_that_cannot_be_used(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    metadata = metadata_of(tmp_path / "model.gguf", add_byte_level_bpe("smollm"))
    for key, value in change.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        metadata[name] = value
    with pytest.raises(error, match=message) as caught:
        tokenizer_from_gguf(tmp_path, metadata, VOCAB_SIZE)
    assert "\n" not in str(caught.value)
