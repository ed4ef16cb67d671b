"""A `transformers` tokenizer from the metadata of a GGUF file, for byte-level BPE.

The regular expressions are those of the original tokenizers, which llama.cpp selects by `tokenizer.ggml.pre`
(src/llama-vocab.cpp); the Unicode normalisation of Qwen and OLMo, which llama.cpp leaves out, is the original's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subten.errors import CheckpointError, UnknownArchitectureError

MODEL_KEY = "tokenizer.ggml.model"
PRE_KEY = "tokenizer.ggml.pre"
TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"
MERGES_KEY = "tokenizer.ggml.merges"
BYTE_LEVEL_BPE = "gpt2"
# gguf.TokenType
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION + "?"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before the merges: one expression after the other cuts what is left.

    `ignore_merges`: a word that is a token is taken whole. `add_bos`: whether a begin-of-sequence token is added
    where the file does not say. `nfc`: whether text is normalised to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2 = PreTokenizer(
    (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE,), nfc=True
)
_LLAMA3 = PreTokenizer(
    (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE,),
    ignore_merges=True,
    add_bos=True,
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,  # Granite
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-4o": PreTokenizer((_CASED_WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE,)),
}


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata of a GGUF file describe.

    Raises UnknownArchitectureError where it is not byte-level BPE or cuts words in an unknown way, CheckpointError
    where it is missing or contradicts itself.
    """
    model = metadata.get(MODEL_KEY)
    if model is None:
        raise CheckpointError(f"{path} holds no tokenizer")
    if model != BYTE_LEVEL_BPE:
        raise UnknownArchitectureError(
            f"{path}: tokenizer model {model!r} is not supported; supported is {BYTE_LEVEL_BPE} (byte-level BPE)"
        )
    pre = metadata.get(PRE_KEY, "default")
    if pre not in PRE_TOKENIZERS:
        raise UnknownArchitectureError(
            f"{path}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    tokens = _strings(path, metadata, TOKENS_KEY)
    special = {role: _token(path, metadata, key, tokens) for role, key in SPECIAL_TOKENS.items() if key in metadata}
    tokenizer = _byte_level_bpe(path, tokens, _merges(path, metadata, tokens), PRE_TOKENIZERS[pre])
    _add_tokens(path, tokenizer, metadata, tokens)
    _add_sequence_tokens(path, tokenizer, metadata, special, PRE_TOKENIZERS[pre])

    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no string")
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=template, **special
    )
    return fast


def _byte_level_bpe(path: Path, tokens: list[str], merges: list[tuple[str, str]], pre: PreTokenizer) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise CheckpointError(f"{path}: {len(tokens) - len(vocabulary)} tokens of {TOKENS_KEY} occur twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    merges = []
    for merge in _strings(path, metadata, MERGES_KEY):
        left, separator, right = merge.partition(" ")
        if not separator or not {left, right, left + right} <= known:
            raise CheckpointError(f"{path}: merge {merge!r} in {MERGES_KEY} is not of two tokens that form a third")
        merges.append((left, right))
    return merges


def _add_tokens(path: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Tokens that are found in text before it is cut into words: control tokens and those added by users."""
    types = metadata.get(TYPES_KEY)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{path}: {TYPES_KEY} does not give one type for each of {len(tokens)} tokens")
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_sequence_tokens(
    path: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], pre: PreTokenizer
) -> None:
    """Begin and end of sequence, where the file asks for them; always a template, so that nothing adds its own."""
    sequence = ["$A"]
    if metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos):
        sequence.insert(0, _required(path, special, "bos_token"))
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        sequence.append(_required(path, special, "eos_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=sequence,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in sequence if token != "$A"],
    )


def _required(path: Path, special: Mapping[str, str], role: str) -> str:
    if role not in special:
        raise CheckpointError(f"{path}: the tokenizer adds a {role} and does not say which it is")
    return special[role]


def _token(path: Path, metadata: Mapping[str, Any], key: str, tokens: list[str]) -> str:
    index = metadata[key]
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(f"{path}: {key} is {index!r}, expected a token below {len(tokens)}")
    return tokens[index]


def _strings(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{path}: {key} is no list of strings")
    return values
