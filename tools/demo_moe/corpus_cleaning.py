"""What is kept of the extracted text: normalised, without addresses, each paragraph once, nothing that is held
out."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from tools.demo_moe.corpus_readers import Document
from tools.demo_moe.corpus_sources import CODE, REFERENCE

NGRAM = 13
"""Words in a row that count as an overlap with a held-out text, as in the GPT-3 report."""

_ANCHOR = 7
_WORD = re.compile(r"[a-z0-9]+")
_EMAIL = re.compile(r"<?[\w.+-]+ ?(?:@|\(at\)|\[at\]|_at_| AT ) ?[\w-]+(?: ?(?:\.|\(dot\)) ?[\w-]+)+>?")
_ADDRESS_SIGN = re.compile(r"@|\(at\)|\[at\]|_at_| AT ")
_ASCII_LETTERS = re.compile(r"[A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2060\ufeff\ufffd\ue000-\uf8ff¶]")
_PERSONAL = (
    "copyright",
    "(c) 19",
    "(c) 20",
    "author:",
    "authors:",
    "maintainer",
    "all rights reserved",
    "mailing list",
    "signed-off-by",
    "reported-by",
    "contributed by",
    "last modified",
    "last updated",
    "last change",
    "written by",
    "colophon",
    "bug report",
)
_REPLACEMENTS = str.maketrans(
    {
        "\u00a0": " ",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2010": "-",
        "\u2011": "-",
        "\u2212": "-",
        "\ufb01": "fi",
        "\ufb02": "fl",
    }
)
_SHORT = 40
"""Paragraphs below this length, headings mostly, may repeat."""
_MINIMUM_DOCUMENT = 200
_MAXIMUM_PARAGRAPH = 20_000
_LONG_PARAGRAPH = 3_000
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z\"'(])")


def words_of(text: str) -> list[str]:
    """The words that overlap is measured on: lower case, letters and digits only."""
    return _WORD.findall(text.lower())


@dataclass
class HeldOut:
    """The 13-word sequences of the texts that training must not see."""

    ngrams: set[str] = field(default_factory=set)
    anchors: set[str] = field(default_factory=set)

    def add(self, text: str) -> None:
        """Add every 13-word sequence of a held-out text."""
        words = words_of(text)
        self.ngrams.update(_sequences(words, NGRAM))
        self.anchors.update(_sequences(words, _ANCHOR))

    def overlaps(self, words: list[str]) -> bool:
        """Whether any 13 words in a row, of the words of a paragraph, stand in a held-out text."""
        # Of 13 words in a row, one sequence of 7 starts at a multiple of 7: looking at those alone finds every
        # candidate.
        if self.anchors.isdisjoint(_sequences(words, _ANCHOR, NGRAM - _ANCHOR + 1)):
            return False
        return not self.ngrams.isdisjoint(_sequences(words, NGRAM))


def _sequences(words: list[str], length: int, stride: int = 1) -> Iterator[str]:
    return (" ".join(words[i : i + length]) for i in range(0, len(words) - length + 1, stride))


@dataclass
class Tally:
    """Bytes and paragraphs of one source, on their way in and out."""

    bytes_in: int = 0
    bytes_kept: int = 0
    documents: int = 0
    paragraphs_kept: int = 0
    duplicates: int = 0
    unfit: int = 0
    overlaps: int = 0


def normalise(paragraph: str) -> str:
    """NFC, plain quotes and spaces, no control characters, no e-mail addresses."""
    text = paragraph
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_REPLACEMENTS))
    if _ADDRESS_SIGN.search(text):
        text = _EMAIL.sub("", text)
    return _CONTROL.sub("", text.replace("\t", "    ")).strip("\n").rstrip()


def is_fit(paragraph: str, category: str) -> bool:
    """Whether a paragraph reads as text of its category: mostly Latin letters, no dumps, no credits."""
    length = len(paragraph)
    if length < 2 or length > _MAXIMUM_PARAGRAPH or (length < 300 and _names_people(paragraph.lower())):
        return False
    ascii_letters = length - len(_ASCII_LETTERS.sub("", paragraph))
    letters = ascii_letters if paragraph.isascii() else sum(map(str.isalpha, paragraph))
    if letters and ascii_letters < 0.9 * letters:
        return False
    if length < _SHORT:
        return letters > 0
    floor = 0.45 if category in (CODE, REFERENCE) else 0.6
    spaces = paragraph.count(" ") + paragraph.count("\n")
    return ascii_letters > floor * (length - spaces) and spaces * 25 > length


def _names_people(lowered: str) -> bool:
    return any(mark in lowered for mark in _PERSONAL)


def split_long(paragraph: str) -> list[str]:
    """A paragraph of running text over 3,000 characters as several, cut between sentences; others as they are."""
    if len(paragraph) <= _LONG_PARAGRAPH or "\n" in paragraph:
        return [paragraph]
    parts = [""]
    for sentence in _SENTENCE_END.split(paragraph):
        if len(parts[-1]) > _LONG_PARAGRAPH // 3:
            parts.append(sentence)
        else:
            parts[-1] = f"{parts[-1]} {sentence}".lstrip()
    return parts


class Cleaner:
    """One pass over all sources in order of preference. State: the paragraphs already seen."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out = held_out
        self._seen: set[bytes] = set()

    def clean(self, documents: Iterable[Document], category: str, tally: Tally) -> Iterable[str]:
        """Yield the documents that remain, each as one text; counts go into ``tally``."""
        for document in documents:
            kept = []
            for raw in (part for paragraph in document for part in split_long(paragraph)):
                tally.bytes_in += len(raw.encode())
                paragraph = normalise(raw)
                if not is_fit(paragraph, category):
                    tally.unfit += 1
                    continue
                words = words_of(paragraph) if len(paragraph) >= _SHORT else []
                if words and self._is_repeated(words):
                    tally.duplicates += 1
                elif self._held_out.overlaps(words):
                    tally.overlaps += 1
                else:
                    kept.append(paragraph)
            while kept and len(kept[-1]) < _SHORT:  # a heading whose text is gone
                kept.pop()
            text = "\n\n".join(kept)
            substance = sum(len(p) for p in kept if len(p) >= _SHORT)
            if len(text) >= _MINIMUM_DOCUMENT and substance > 0.5 * len(text):
                tally.documents += 1
                tally.paragraphs_kept += len(kept)
                tally.bytes_kept += len(text.encode())
                yield text

    def _is_repeated(self, words: list[str]) -> bool:
        key = blake2b(" ".join(words).encode(), digest_size=8).digest()
        if key in self._seen:
            return True
        self._seen.add(key)
        return False
