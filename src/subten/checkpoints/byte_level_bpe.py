"""Byte-level BPE tokenizers, and how each kind cuts text into words before the merges.

The regular expressions are those of the original tokenizers, which llama.cpp selects by name (src/llama-vocab.cpp);
the Unicode normalisation of Qwen and OLMo, which llama.cpp leaves out, is the original's too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION + "?"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words: one expression after the other cuts the pieces that the last one left.

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


def byte_level_bpe(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pre_tokenizer: PreTokenizer
) -> Tokenizer:
    """A tokenizer whose tokens are sequences of bytes, written in GPT-2's printable alphabet.

    Every merge must be of two tokens that form a third.
    """
    model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pre_tokenizer.ignore_merges)
    tokenizer = Tokenizer(model)
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre_tokenizer.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
