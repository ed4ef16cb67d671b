"""`subten eval layers`: which layers the loss of a KV format comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from subten.cli import options
from subten.cli.eval_options import Json, OptionalText, Plot, result_files, text_to_measure_on
from subten.cli.terminal import progress, show


def eval_layers(
    model: options.Model,
    text: OptionalText = None,
    kv: Annotated[str, typer.Option("--format", help="KV format; `subten info` lists them.")] = "kv2",
    context: Annotated[int, typer.Option(help="Tokens in one window.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens in all windows.")] = 4096,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    json: Json = None,
    plot: Plot = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    kernel: options.Kernel = None,
) -> None:
    """Find the layers that a format's loss comes from.

    One layer's cache is in the format and all others are in 16 bit: KL divergence from 16 bit everywhere, for
    each layer in turn and for all of them together.
    """
    from subten.engine import load_model
    from subten.engine.mixed_cache import CHUNK_SIZE
    from subten.evals.figures import computed_by, sha256_of_text
    from subten.evals.layers import measure_layers
    from subten.evals.layers_report import layers_json, layers_table
    from subten.evals.plot import layers_plot
    from subten.evals.quality import cut_windows
    from subten.evals.report import Run
    from subten.formats import get_format

    fmt = get_format(kv, sinks, recent)
    rows_file, picture_file = result_files(json, plot, text)
    content = text_to_measure_on(text)

    with progress("loading") as loaded:
        loaded_model = load_model(
            model, dtype=dtype, device=device, kernels=options.kernels(kernel), weights=weights, progress=loaded
        )
    tokenizer = loaded_model.tokenizer
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    if text is None:
        # Calibration has seen the beginning of this text.
        token_ids = token_ids[-tokens:]
    windows = cut_windows(token_ids, context, tokens, tokenizer.bos_prefix)
    with progress("measuring") as measured:
        results = measure_layers(loaded_model, fmt, windows, measured)
    run = Run(
        **computed_by(loaded_model),
        text_sha256=sha256_of_text(content),
        context=context,
        tokens=len(windows) * context,
        decode_tail=0,
        prefill="window",
        chunk_size=CHUNK_SIZE,
    )
    show(layers_table(results, run))
    if rows_file is not None:
        rows_file.write(layers_json(results, run))
    if picture_file is not None and plot is not None:
        picture_file.write(layers_plot(results, run, plot.suffix))
