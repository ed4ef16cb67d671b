"""A `transformers` tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subten.checkpoints.byte_level_bpe import PRE_TOKENIZERS, PreTokenizer, byte_level_bpe
from subten.checkpoints.sentencepiece_bpe import sentencepiece_bpe
from subten.errors import CheckpointError, UnknownArchitectureError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
TEXT = "$A"


@dataclass(frozen=True)
class _TokenizerMetadata:
    """The metadata below `tokenizer.ggml.`, checked as they are read."""

    path: Path
    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(PREFIX + key, default)

    def list_of(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise CheckpointError(f"{self.path}: {PREFIX}{key} is no list of {kind.__name__}")
        if length is not None and len(values) != length:
            raise CheckpointError(f"{self.path}: {PREFIX}{key} has {len(values)} entries for {length} tokens")
        return values

    def vocabulary(self) -> dict[str, int]:
        tokens = self.list_of("tokens", str)
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(vocabulary) < len(tokens):
            raise CheckpointError(f"{self.path}: {len(tokens) - len(vocabulary)} of {PREFIX}tokens occur twice")
        return vocabulary

    def merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        merges = []
        for merge in self.list_of("merges", str):
            left, _, right = merge.partition(" ")
            if not all(token in vocabulary for token in (left, right, left + right)):
                raise CheckpointError(f"{self.path}: merge {merge!r} is not of two tokens that form a third")
            merges.append((left, right))
        return merges

    def named_tokens(self, vocabulary: Mapping[str, int]) -> dict[str, str]:
        """The tokens of `ROLES` that the file names."""
        tokens = list(vocabulary)
        named = {}
        for role, name in ROLES.items():
            index = self.get(key := f"{name}_token_id")
            if index is None:
                continue
            if not isinstance(index, int) or not 0 <= index < len(tokens):
                raise CheckpointError(
                    f"{self.path}: {PREFIX}{key} is {index!r}, expected a token below {len(tokens)}"
                )
            named[role] = tokens[index]
        return named


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata of a GGUF file describe: byte-level BPE or SentencePiece BPE.

    `vocab_size` is the number of embeddings, which may exceed that of tokens. Raises UnknownArchitectureError where
    the tokenizer is of another kind or cuts words in an unknown way, CheckpointError where it is missing or
    contradicts itself.
    """
    source = _TokenizerMetadata(path, metadata)
    model = source.get("model")
    if model is None:
        raise CheckpointError(f"{path} holds no tokenizer")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no string")
    vocabulary = source.vocabulary()
    if len(vocabulary) > vocab_size:
        raise CheckpointError(f"{path} has {len(vocabulary)} tokens and only {vocab_size} embeddings")
    types = dict(zip(vocabulary, source.list_of("token_type", int, len(vocabulary)), strict=True))
    named = source.named_tokens(vocabulary)
    match model:
        case "gpt2":
            pre_tokenizer = _pre_tokenizer(source)
            tokenizer = byte_level_bpe(vocabulary, source.merges(vocabulary), pre_tokenizer)
            add_bos = pre_tokenizer.add_bos
        case "llama":
            tokenizer = _sentencepiece(source, vocabulary, types, named)
            add_bos = True
        case other:
            raise UnknownArchitectureError(
                f"{path}: tokenizer model {other!r} is not supported; supported are gpt2 (byte-level BPE) "
                "and llama (SentencePiece BPE)"
            )
    # Found in text before it is cut into words.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in types.items()
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    _set_sequence(source, tokenizer, named, add_bos=add_bos)
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=template, **named
    )
    return fast


def _pre_tokenizer(source: _TokenizerMetadata) -> PreTokenizer:
    name = source.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnknownArchitectureError(
            f"{source.path}: pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(
    source: _TokenizerMetadata, vocabulary: dict[str, int], types: Mapping[str, int], named: Mapping[str, str]
) -> Tokenizer:
    if source.get("remove_extra_whitespaces", False):
        raise UnknownArchitectureError(f"{source.path}: a tokenizer that removes white space is not supported")
    scores = zip(vocabulary, source.list_of("scores", float, len(vocabulary)), strict=True)
    return sentencepiece_bpe(
        vocabulary,
        {piece: score for piece, score in scores if types[piece] == NORMAL},
        named.get("unk_token"),
        space_prefix=bool(source.get("add_space_prefix", True)),
    )


def _set_sequence(
    source: _TokenizerMetadata, tokenizer: Tokenizer, named: Mapping[str, str], *, add_bos: bool
) -> None:
    """Begin and end of sequence, where the file asks for them; always a template, so that nothing adds its own."""
    sequence = [TEXT]
    if source.get("add_bos_token", add_bos):
        sequence.insert(0, _required(source, named, "bos_token"))
    if source.get("add_eos_token", False):
        sequence.append(_required(source, named, "eos_token"))
    added = [(token, tokenizer.token_to_id(token)) for token in sequence if token != TEXT]
    try:
        tokenizer.post_processor = processors.TemplateProcessing(single=sequence, special_tokens=added)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {added} can't begin or end a sequence ({error})") from error


def _required(source: _TokenizerMetadata, named: Mapping[str, str], role: str) -> str:
    if role not in named:
        raise CheckpointError(f"{source.path}: the tokenizer adds a {role} and does not say which it is")
    return named[role]
