"""Puts tables and pictures of committed measurements into the documentation."""

from __future__ import annotations

from pathlib import Path

from subten.bench.article import render
from subten.bench.plots import pictures
from subten.bench.published import Published
from subten.errors import StorageError
from subten.outputs import OutputFile

BEGIN, END = "<!-- results: rendered by `subten bench report` -->", "<!-- end of results -->"


def publish(results: Path, docs: Path) -> list[Path]:
    """Write the document's section of results, and its pictures; the files that were written.

    Raises:
        StorageError: a file can't be read or written, or the document has no place for results.
        ParameterError: matplotlib is not installed.
    """
    found, document = Published.read(results), docs / "README.md"
    content = {document: with_results(document, render(found)).encode()}
    content |= {docs / name: picture for name, picture in pictures(found).items()}
    for path, written in content.items():
        OutputFile(path).write(written)
    return list(content)


def with_results(document: Path, section: str) -> str:
    """The document with this in place of its results.

    Raises:
        StorageError: it can't be read, or has no place for them.
    """
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{document} can't be read: {error.strerror or error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise StorageError(f"{document} has no place for results: two lines, {BEGIN} and {END}")
    inside = f"\n\n{section}\n\n" if section else "\n"
    return f"{before}{begin}{inside}{end}{after}"
