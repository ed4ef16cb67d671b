"""`subten calibrate`: measure what the formats need to know of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subten.cli import options
from subten.cli.terminal import progress


def calibrate(
    model: options.Model,
    text: Annotated[Path | None, typer.Option(help="A text of your own [default: the one that ships].")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of it to use.")] = 1536,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Measure what 2-bit and 4-bit caches need to know of a model.

    Queries and keys are measured on a text, which uses of that help is decided on its last third, and the result is
    saved beside the model. Without it, the first start measures on the text that ships and keeps the result in
    subten's own folder.
    """
    from subten.cli.files import read_text
    from subten.engine import calibrate as measure
    from subten.engine import load_model, save_calibration
    from subten.engine.calibrate import calibration_path
    from subten.outputs import OutputFile

    content = None if text is None else read_text(text)
    with progress("loading") as loaded:
        loaded_model = load_model(model, dtype=dtype, device=device, progress=loaded)
    path = calibration_path(loaded_model)
    OutputFile(path)
    result = measure(loaded_model, content, tokens)
    save_calibration(result, path)
    layers = len(result.mean_key)
    removed = int(result.mean_key.flatten(1).any(-1).sum())
    shaped, whitened = (flags.float().mean() for flags in (result.shape_keys, result.whiten_keys))
    print(
        f"calibrated on {result.tokens} tokens: the mean key is removed in {removed} of {layers} layers, the "
        f"rounding of keys is shaped in {shaped:.0%} and keys are whitened in {whitened:.0%} of the heads"
    )
    print(f"saved as {path}")
