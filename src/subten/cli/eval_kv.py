"""`subten eval kv`: what KV formats cost in quality, on a text of the user's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subten.cli import options
from subten.cli.eval_options import Formats, Json, Plot, named_formats, result_files
from subten.cli.files import read_text
from subten.cli.terminal import progress, show

DECODED_SHARE = 16
"""One token in 16, the last ones of a window, is decoded alone; the others come in chunks."""


def eval_kv(
    model: options.Model,
    text: Annotated[Path, typer.Option(help="UTF-8 text to measure on.")],
    formats: Formats = "fp8,kv4,int4,k4v2,kv2,kivi2",
    context: Annotated[int, typer.Option(help="Tokens in one window.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens in all windows.")] = 4096,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    prefill: options.Prefill = "window",
    chunk_size: options.ChunkSize = 256,
    decode_tail: Annotated[
        int | None, typer.Option(min=0, help="Tokens at a window's end decoded one by one [default: context / 16].")
    ] = None,
    json: Json = None,
    plot: Plot = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    kernel: options.Kernel = None,
) -> None:
    """Compare KV formats with the 16-bit cache.

    Perplexity, KL divergence, agreement on the most probable token and bits per element, all on the same tokens.
    The text is cut into windows of `context` tokens. Each goes through the path that serves requests: chunked
    prefill over the quantised history, then decoding.
    """
    from subten.engine import LLM, load_model
    from subten.evals.figures import computed_by, sha256_of_text
    from subten.evals.plot import quality_plot
    from subten.evals.quality import REFERENCE_FORMAT, cut_windows, measure
    from subten.evals.report import Run, quality_table, to_json
    from subten.formats import KVFormat, get_format

    chosen = named_formats(formats, sinks, recent)
    rows_file, picture_file = result_files(json, plot, text)
    content = read_text(text)

    with progress("loading") as loaded:
        loaded_model = load_model(
            model, dtype=dtype, device=device, kernels=options.kernels(kernel), weights=weights, progress=loaded
        )
    tokenizer = loaded_model.tokenizer
    windows = cut_windows(tokenizer.encode(content, add_special_tokens=False), context, tokens, tokenizer.bos_prefix)

    def engine(fmt: KVFormat) -> LLM:
        return LLM(
            loaded_model,
            kv=fmt,
            max_context=context,
            max_batch=1,
            prefill=prefill,  # type: ignore[arg-type]  # LLM checks it and names the choices
            chunk_size=chunk_size,
        )

    tail = context // DECODED_SHARE if decode_tail is None else min(decode_tail, context)
    reference, candidates = engine(get_format(REFERENCE_FORMAT)), [engine(fmt) for fmt in chosen]
    with progress("measuring") as measured:
        results = measure(reference, candidates, windows, tail, measured)
    run = Run(
        **computed_by(loaded_model),
        text_sha256=sha256_of_text(content),
        context=context,
        tokens=len(windows) * context,
        decode_tail=tail,
        prefill=prefill,
        chunk_size=chunk_size,
    )
    show(quality_table(results, run))
    if rows_file is not None:
        rows_file.write(to_json(results, run))
    if picture_file is not None and plot is not None:
        picture_file.write(quality_plot(results, run, plot.suffix))
