"""Tiny trained tokenizers, as their makers configure them, and their GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL_TOKENS = ["<unk>", "<|bos|>", "<|eos|>"]
USER_TOKENS = ["<tool>"]
TEMPLATE = "{% for m in messages %}<|bos|>{{ m['content'] }}<|eos|>{% endfor %}"
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog's owner doesn't mind: it's 12:30, on 2024-11-29.",
    "Größe, naïve café, 漢字かな交じり文, Привет мир, مرحبا, 🙂🚀, e\u0301 is é, 10000000000 and 3.14159!",
    "\n\n\n\tdef f(x):\n\t\treturn x  # 'quoted'\r\n \r\n",
    "HELLO World, I'LL we'Re   many   spaces \u00a0 and trailing   ",
]
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


# As in the tokenizer.json of SmolLM2, GPT-2, OLMoE, Qwen2, Llama 3 and GPT-4o.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "gpt-2": _byte_level,
    "olmo": _byte_level,
    "qwen2": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "gpt-4o": lambda: _split(_GPT4O),
}
NFC = {"olmo", "qwen2"}


@cache
def train(pre: str) -> Tokenizer:
    """A byte-level BPE tokenizer of 320 tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in NFC:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=CONTROL_TOKENS + USER_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def add_byte_level_bpe(pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """Writes the trained tokenizer's metadata, as `_set_vocab_gpt2` of llama.cpp's conversion/base.py does."""

    def add(writer: gguf.GGUFWriter) -> None:
        model = json.loads(train(pre).to_str())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        kinds = dict.fromkeys(CONTROL_TOKENS, gguf.TokenType.CONTROL)
        kinds |= dict.fromkeys(USER_TOKENS, gguf.TokenType.USER_DEFINED)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)

    return add
