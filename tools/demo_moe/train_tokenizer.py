"""Train the demo model's tokenizer: byte-level BPE, digits one by one.

    python -m tools.demo_moe.train_tokenizer --text DIR --out DIR --vocab-size 8192

Reads ``DIR/CATEGORY.txt``; prose counts most, and a part of it is seen with the spacing of tokenised corpora too,
as in training. Writes ``tokenizer.json`` and ``tokenizer_config.json`` for transformers' ``AutoTokenizer``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.demo_moe.text_pieces import DOCUMENT_END, END_OF_TEXT, wikitext_spacing

PADDING = "<|padding|>"
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's splitting rule: words with the character before them, single digits, runs of signs, runs of white space."""
_SHARES = {"prose": 1.0, "guide": 0.15, "reference": 0.1, "code": 0.25}
_SPACED_SHARE = 0.4


def new_tokenizer() -> Tokenizer:
    """An untrained tokenizer with the splitting rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sample(text: Path, scale: float = 1.0) -> Iterator[str]:
    """Documents to train on: every n-th of each category, so that the shares of ``_SHARES`` come out."""
    for category, share in _SHARES.items():
        documents = (text / f"{category}.txt").read_text(encoding="utf-8").split(DOCUMENT_END)
        wanted = share * scale
        for i, document in enumerate(documents):
            if int((i + 1) * wanted) > int(i * wanted):
                yield document
                if category == "prose" and int((i + 1) * _SPACED_SHARE) > int(i * _SPACED_SHARE):
                    yield wikitext_spacing(document)


def train(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train on documents; the two special tokens have the highest ids."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT, PADDING])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path, max_context: int) -> None:
    """Write the two files that ``AutoTokenizer`` reads."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Parse the command line, train, save, and say what it gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument("--scale", type=float, default=1.0, help="train on this share of the sample")
    arguments = parser.parse_args()
    tokenizer = train(sample(arguments.text, arguments.scale), arguments.vocab_size)
    save(tokenizer, arguments.out, arguments.max_context)
    size = (arguments.out / "tokenizer.json").stat().st_size
    print(f"{tokenizer.get_vocab_size()} entries, tokenizer.json {size / 1e3:.0f} kB")
    for path in sorted(arguments.text.glob("*.validation.txt")):
        text = path.read_text(encoding="utf-8").replace(DOCUMENT_END, "\n")[:2_000_000]
        print(f"{path.stem:24s} {len(text.encode()) / len(tokenizer.encode(text).ids):.3f} bytes a token")


if __name__ == "__main__":
    main()
