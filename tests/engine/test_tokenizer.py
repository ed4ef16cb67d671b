from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from subten.engine.tokenizer import DecodeStream, Tokenizer
from subten.errors import CheckpointError, ParameterError

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then sleeps. The dog does not mind; it has seen foxes.",
    "größer, naïve café, señor; 你好世界, こんにちは; привет мир; 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "def f(x):\n    return x ** 2\n\n\tprint(f(3))  # 9",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|ünïcode|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in SmolLM2, Qwen, OLMoE and Granite, with few merges so that characters are split."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    rust.add_tokens(["<tool_call>", "é!"])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>", **options)


def byte_fallback(**options: Any) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback, as in Llama 2 and Mixtral."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁the", "�", "<0xZZ>"]
    pieces += list("abcdefghijklmnopqrstuvwxyzé你!.")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    rust = RustTokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options
    )


BYTE_LEVEL, BYTE_FALLBACK = Tokenizer(byte_level()), Tokenizer(byte_fallback())
tokenizers = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
texts = st.text() | st.lists(
    st.sampled_from(["你", "é", "👩‍👧", "�", " ", "a", "\n", "<|end|>", "</s>", "é!", "the", "\x00", "<0x41>"])
).map("".join)


def pieces_of(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None, skip: bool = True) -> list[str]:
    stream = DecodeStream(tokenizer, context or [], skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


def reference(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """What the Rust decoder says, reached without the code under test."""
    text: str = tokenizer.backend.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    return text


@tokenizers
@given(text=texts, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_of_a_text_are_its_full_decode(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip) == reference(tokenizer, ids, skip)


@tokenizers
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_joined_pieces_of_any_tokens_are_their_full_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    vocabulary = len(tokenizer.backend)
    # Ids past the vocabulary occur where a model's output is padded to a round size.
    plain = st.integers(0, vocabulary + 3)
    hard = st.sampled_from(hard_tokens(tokenizer))
    ids = data.draw(st.lists(plain | hard, max_size=40))
    pieces = pieces_of(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip) == reference(tokenizer, ids, skip)


def hard_tokens(tokenizer: Tokenizer) -> list[int]:
    """Lead and continuation bytes of long characters, bytes that are never valid, spaces and special tokens."""
    backend = tokenizer.backend
    if tokenizer is BYTE_FALLBACK:
        names = [f"<0x{byte:02X}>" for byte in (0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x91, 0xFF, 0x20, 0x41)]
        names += ["▁", "▁a", "�", "<0xZZ>", "</s>", "你"]
        return [backend.convert_tokens_to_ids(name) for name in names]
    byte_ids = [backend.convert_tokens_to_ids(character) for character in "ä½łðŁĳÿĠa"]
    assert None not in byte_ids
    return [*byte_ids, *tokenizer.encode("�"), *(backend.convert_tokens_to_ids(s) for s in SPECIAL)]


@tokenizers
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="�")))
@settings(max_examples=200, deadline=None)
def test_a_split_character_never_shows(tokenizer: Tokenizer, text: str) -> None:
    # Metaspace tokenizers can't tell a typed lower one eighth block, or a missing leading space, from a space.
    text = "a" + text.replace("▁", "_")
    shown = ""
    for piece in pieces_of(tokenizer, tokenizer.encode(text)):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@tokenizers
@given(before=st.text(max_size=12), after=st.text(max_size=12))
@settings(max_examples=200, deadline=None)
def test_with_a_context_the_pieces_are_what_the_tokens_add_to_it(
    tokenizer: Tokenizer, before: str, after: str
) -> None:
    ids = tokenizer.encode("the " + before + " a")
    following = tokenizer.encode(" " + after, add_special_tokens=False)
    whole, start = tokenizer.decode(ids + following), tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer, following, context=ids)) == whole.removeprefix(start)


def test_a_leading_space_survives_behind_a_prompt() -> None:
    the = [BYTE_FALLBACK.backend.convert_tokens_to_ids("▁the")]
    assert pieces_of(BYTE_FALLBACK, the) == ["the", ""]
    assert pieces_of(BYTE_FALLBACK, the, context=BYTE_FALLBACK.encode("a")) == [" the", ""]


@tokenizers
def test_an_unfinished_character_comes_with_the_end_only(tokenizer: Tokenizer) -> None:
    ids = hard_tokens(tokenizer)[:2]  # two of the three bytes of 你
    pieces = pieces_of(tokenizer, [*tokenizer.encode("a"), *ids])
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == reference(tokenizer, ids)


@tokenizers
@pytest.mark.parametrize("which", [0, 6, -1], ids=["lead_byte", "invalid_byte", "special_or_character"])
def test_time_is_linear_in_the_number_of_tokens(tokenizer: Tokenizer, which: int) -> None:
    token_id = hard_tokens(tokenizer)[which]

    def seconds(count: int) -> float:
        start = time.process_time()
        pieces_of(tokenizer, [token_id] * count)
        return time.process_time() - start

    seconds(500)
    # Quadratic time would show a factor of 64.
    assert seconds(16_000) < 24 * max(seconds(2_000), 1e-3)


def test_encode_adds_what_the_model_wants_and_only_on_request() -> None:
    assert BYTE_LEVEL.bos_prefix == ()
    assert BYTE_FALLBACK.bos_prefix == (1,)
    assert BYTE_FALLBACK.encode("a")[0] == 1
    assert 1 not in BYTE_FALLBACK.encode("a", add_special_tokens=False)


def test_long_texts_are_encoded_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(byte_level(model_max_length=16))
    assert len(tokenizer.encode("word " * 100)) > 16
    assert not caplog.records


def test_spaces_before_punctuation_are_not_cleaned_away() -> None:
    tokenizer = Tokenizer(byte_level(clean_up_tokenization_spaces=True))
    text = "it 's here . Really ?"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_renders_the_template_up_to_the_answer() -> None:
    tokenizer = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|begin|>user\nhi<|end|><|begin|>assistant\n"
    assert tokenizer.backend.convert_tokens_to_ids("<|end|>") in ids


def test_chat_without_a_template_is_one_clear_error() -> None:
    assert not BYTE_LEVEL.has_chat_template
    with pytest.raises(ParameterError, match="no chat template"):
        BYTE_LEVEL.chat([{"role": "user", "content": "hi"}])


def test_a_conversation_that_the_template_refuses_is_one_clear_error() -> None:
    tokenizer = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    with pytest.raises(ParameterError, match="no system role"):
        tokenizer.chat([{"role": "system", "content": "be nice"}])


def test_whatever_a_template_fails_with_is_one_clear_error() -> None:
    with pytest.raises(ParameterError, match=r"refuses the conversation: .*division"):
        BYTE_LEVEL.chat_text([{"role": "user", "content": ""}], template="{{ 1 // 0 }}")
    nested: list = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(ParameterError, match=r"refuses the conversation: .*recursion"):
        BYTE_LEVEL.chat_text([{"role": "user", "content": nested}], template="{{ messages }}")


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}{% endfor %}", "{{ messages.x.y }}"]
)
def test_a_template_that_can_not_be_computed_is_one_clear_error(template: str) -> None:
    with pytest.raises(ParameterError, match="chat template refuses"):
        BYTE_LEVEL.chat_text([{"role": "user", "content": "hi"}], template=template)


def test_a_text_with_surrogates_is_one_clear_error() -> None:
    with pytest.raises(ParameterError, match=r"'\\udcff' at character 2"):
        BYTE_LEVEL.encode("hi\udcff")


def checkpoint(path: Path, config: dict[str, Any]) -> Any:
    return SimpleNamespace(path=path, config=config, tokenizer=byte_level)


def test_ending_tokens_are_gathered_from_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    end = byte_level().eos_token_id
    assert Tokenizer.from_checkpoint(checkpoint(tmp_path, {})).eos_token_ids == {end}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert Tokenizer.from_checkpoint(checkpoint(tmp_path, {"eos_token_id": 5})).eos_token_ids == {end, 5, 7, 8}
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    assert Tokenizer.from_checkpoint(checkpoint(gguf, {"eos_token_id": None})).eos_token_ids == {end, 7, 8}


def test_a_damaged_generation_config_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Tokenizer.from_checkpoint(checkpoint(tmp_path, {}))


def test_an_ending_token_that_is_no_id_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is 'end'"):
        Tokenizer.from_checkpoint(checkpoint(tmp_path, {"eos_token_id": "end"}))
