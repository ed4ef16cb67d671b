"""What the commands of `subten eval` have in common: options, formats, texts and result files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subten.errors import ParameterError

if TYPE_CHECKING:
    from subten.formats import KVFormat
    from subten.outputs import OutputFile

Formats = Annotated[str, typer.Option(help="Formats, separated by commas.")]
Json = Annotated[Path | None, typer.Option(help="Write the rows to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a picture to this .png, .svg or .pdf.")]
OptionalText = Annotated[
    Path | None, typer.Option("--text", help="UTF-8 text to measure on [default: the one that ships].")
]


def named_formats(formats: str, sinks: int | None, recent: int | None) -> list[KVFormat]:
    """The formats of `--formats`, each once, with the windows that were asked for.

    Raises:
        ParameterError: there is none.
        UnknownFormatError: a name that is no format, or windows that make no sense.
    """
    from subten.formats import get_format

    names = [name.strip() for name in formats.split(",") if name.strip()]
    if not names:
        raise ParameterError("--formats is empty; give names separated by commas, such as kv2,kv4")
    return [get_format(name, sinks, recent) for name in dict.fromkeys(names)]


def result_files(
    json: Path | None, plot: Path | None = None, text: Path | None = None
) -> tuple[OutputFile | None, OutputFile | None]:
    """The files for rows and picture, checked before the long work; `text` is the file that is measured on.

    Raises:
        ParameterError: two of them are the same, or a picture can't be drawn.
        StorageError: one can't be written.
    """
    from subten.evals.plot import require_matplotlib
    from subten.outputs import OutputFile

    named = {"--text": text, "--json": json, "--plot": plot}
    before: dict[str, str] = {}
    for option, path in named.items():
        if path is not None and (other := before.setdefault(os.path.realpath(path), option)) != option:
            raise ParameterError(f"{other} and {option} both name {path}; give two files")
    if plot is not None:
        require_matplotlib(plot.suffix)
    return None if json is None else OutputFile(json), None if plot is None else OutputFile(plot)


def text_to_measure_on(path: Path | None) -> str:
    """A user's text, or the one that ships.

    Raises:
        StorageError: the file can't be read or is not UTF-8.
    """
    from subten.cli.files import read_text
    from subten.engine.calibrate import shipped_text

    return shipped_text() if path is None else read_text(path)
