"""`subten calibrate`: choose the key channels that a model's caches keep in 16 bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subten.cli import options
from subten.cli.terminal import progress


def calibrate(
    model: options.Model,
    text: Annotated[Path | None, typer.Option(help="A text of your own [default: the one that ships].")] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of it to use.")] = 512,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Choose the key channels that stay in 16 bit.

    A model's keys are measured on a text, and the result is saved beside the model. Without it, every start
    measures on the text that ships and saves nothing.
    """
    from subten.cli.files import read_text
    from subten.engine import calibrate as measure
    from subten.engine import load_model, save_calibration
    from subten.engine.calibrate import calibration_path
    from subten.evals.outputs import OutputFile

    content = None if text is None else read_text(text)
    with progress("loading") as loaded:
        loaded_model = load_model(model, dtype=dtype, device=device, progress=loaded)
    path = calibration_path(loaded_model)
    OutputFile(path)
    result = measure(loaded_model, content, tokens)
    save_calibration(result, path)
    share = result.key_pair_energy.amax(-1) / result.key_pair_energy.sum(-1)
    print(
        f"calibrated on {result.tokens} tokens: the strongest of {result.key_pair_energy.shape[-1]} rotary pairs "
        f"holds {share.min():.0%} to {share.max():.0%} of a head's key energy ({share.mean():.0%} on average)"
    )
    print(f"saved as {path}")
