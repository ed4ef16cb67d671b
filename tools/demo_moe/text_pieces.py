"""Carry the corpus to a machine without a network: compress it in pieces there are limits for, and turn it into
tokens.

    python -m tools.demo_moe.text_pieces pack --text DIR --heldout DIR --out DIR --limit-mib 56
    python -m tools.demo_moe.text_pieces tokenise --pieces DIR --tokenizer FILE --out DIR

``pack`` writes ``OUT/part1``, ``OUT/part2``, ... of at most ``limit-mib`` each. ``tokenise`` reads all pieces in one
folder and writes ``NAME.u16``, little-endian 16-bit token ids, documents separated by <|endoftext|>. Prose is written
twice: as it is, and as ``prose-spaced`` in the spacing of tokenised corpora (``wikitext_spacing``).
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_END = "\x00"
SPACED = {"prose": "prose-spaced", "sampled": "sampled-spaced"}
"""Categories that are also rendered with ``wikitext_spacing``, and the names of the results."""
_PIECE_CHARACTERS = 12_000_000
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**24, "lc": 4, "pb": 0}
"""For text: no alignment, more context of the byte before."""
_HELDOUT_CHARACTERS = 1_300_000


def wikitext_spacing(document: str) -> str:
    """Render a document as corpora such as WikiText and the Penn Treebank come: punctuation between spaces.

    The conventions are those of the Moses tokeniser with split hyphens and numbers ("self @-@ made", "1 @,@ 200"),
    one paragraph per line and headings between equals signs.
    """
    lines = []
    for paragraph in document.split("\n\n"):
        text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", paragraph.replace("\n", " "))
        text = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", text)
        text = re.sub(r"(?<!@)([,;:?!()\[\]\"$%&/])(?!@)", r" \1 ", text)
        text = re.sub(r"(?<![.@\w])\.\.\.(?!\.)|(?<=\w)\.\.\.", " ... ", text)
        text = re.sub(r"(?<![\s.@A-Z])\.(?=\s|$)|(?<=[A-Z]{2})\.(?=\s|$)|\.(?=$)", " .", text)
        text = re.sub(r"(?<=\w)'(?=\w)", " '", text)
        text = " ".join(text.split())
        heading = len(text) < 60 and text[:1].isupper() and text[-1:] not in ".,;:?!\"'"
        lines.append(f" = {text} = " if heading else f" {text} ")
    return "\n".join(lines)


def pack(text: Path, heldout: Path, out: Path, limit_mib: float) -> None:
    """Compress every ``*.txt`` of ``text`` in pieces and spread them over parts, largest category first."""
    jobs = [(path.stem, i, piece) for path in sorted(text.glob("*.txt")) for i, piece in enumerate(_pieces(path))]
    jobs += [
        (f"heldout-{p.stem}", 0, p.read_bytes().decode("utf-8")[:_HELDOUT_CHARACTERS])
        for p in sorted(heldout.glob("*.txt"))
    ]
    part, used = 1, 0.0
    with ProcessPoolExecutor(2) as pool:
        for (name, index, _), data in zip(jobs, pool.map(_compress, [piece for *_, piece in jobs]), strict=True):
            if used + len(data) > limit_mib * 2**20:
                part, used = part + 1, 0.0
            folder = out / f"part{part}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.{index:03d}.xz").write_bytes(data)
            used += len(data)
    for folder in sorted(out.glob("part*")):
        print(folder, f"{sum(f.stat().st_size for f in folder.iterdir()) / 2**20:.1f} MiB")


def _pieces(path: Path) -> Iterator[str]:
    documents = path.read_bytes().decode("utf-8").split(DOCUMENT_END)
    piece: list[str] = []
    size = 0
    for document in documents:
        piece.append(document)
        size += len(document)
        if size > _PIECE_CHARACTERS:
            yield DOCUMENT_END.join(piece)
            piece, size = [], 0
    if size:
        yield DOCUMENT_END.join(piece)


def _compress(piece: str) -> bytes:
    return lzma.compress(piece.encode(), format=lzma.FORMAT_XZ, filters=[_FILTER])


def tokenise(pieces: Path, tokenizer: Path, out: Path, jobs: int) -> None:
    """Write one token file per category, and ``NAME.bytes`` beside the held-out and validation ones."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    paths = sorted(pieces.glob("*.xz"))
    results: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for name, ids, size in pool.map(_encode_piece, *zip(*_renderings(paths, tokenizer), strict=True)):
            results.setdefault(name, []).append(ids)
            sizes[name] = sizes.get(name, 0) + size
    for name, parts in results.items():
        ids = np.concatenate(parts)
        ids.tofile(out / f"{name}.u16")
        (out / f"{name}.bytes").write_text(f"{sizes[name]}\n")
        print(
            f"{name:24s} {sizes[name] / 1e6:8.2f} MB {ids.size / 1e6:8.2f} M tokens "
            f"{sizes[name] / ids.size:.3f} bytes a token"
        )
    print(f"tokenised in {time.monotonic() - started:.0f} s")


def _renderings(paths: list[Path], tokenizer: Path) -> Iterator[tuple[Path, Path, str]]:
    for path in paths:
        name = path.name.split(".0")[0]
        yield path, tokenizer, name
        if name in SPACED:
            yield path, tokenizer, SPACED[name]


def _encode_piece(path: Path, tokenizer_file: Path, name: str) -> tuple[str, np.ndarray, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(END_OF_TEXT)
    text = lzma.decompress(path.read_bytes()).decode()
    documents = [d for d in text.split(DOCUMENT_END) if d]
    if name in SPACED.values():
        documents = [wikitext_spacing(d) for d in documents]
    size = sum(len(d.encode()) for d in documents)
    held_out = name.startswith("heldout")
    rows = []
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        rows.append(np.array(encoding.ids if held_out else [*encoding.ids, end], dtype=np.uint16))
    return name, np.concatenate(rows), size


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--text", type=Path, required=True)
    packing.add_argument("--heldout", type=Path, required=True)
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--limit-mib", type=float, default=56.0)
    tokenising = commands.add_parser("tokenise")
    tokenising.add_argument("--pieces", type=Path, required=True)
    tokenising.add_argument("--tokenizer", type=Path, required=True)
    tokenising.add_argument("--out", type=Path, required=True)
    tokenising.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.text, arguments.heldout, arguments.out, arguments.limit_mib)
    else:
        tokenise(arguments.pieces, arguments.tokenizer, arguments.out, arguments.jobs)


if __name__ == "__main__":
    main()
