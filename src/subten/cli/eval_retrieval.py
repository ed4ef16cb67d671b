"""`subten eval retrieval`: whether a value is found again in a long list, with each KV format."""

from __future__ import annotations

from typing import Annotated

import typer

from subten.cli import options
from subten.cli.eval_options import Formats, Json, named_formats, result_files
from subten.cli.terminal import progress, show
from subten.errors import ParameterError


def eval_retrieval(
    model: options.Model,
    formats: Formats = "kv4,kv2",
    lines: Annotated[str, typer.Option(help="Lengths of the lists, separated by commas.")] = "50,100,200,400",
    trials: Annotated[
        int, typer.Option(min=1, max=1000, help="Questions for each length, each about another list.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Of the random keys and values.")] = 0,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    prefill: options.Prefill = "window",
    chunk_size: options.ChunkSize = 256,
    json: Json = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    kernel: options.Kernel = None,
) -> None:
    """Ask for values in a list of keys and values.

    Random lines such as `key 4821: 93017`, then one of the keys: the share of exact answers, and the log
    probability of the right one, compared with the 16-bit cache on the same prompts. Lists that do not fit the
    model's context are left out and named.
    """
    from subten.engine import LLM, load_model
    from subten.evals.figures import computed_by
    from subten.evals.quality import REFERENCE_FORMAT
    from subten.evals.retrieval import measure_retrieval, write_lists
    from subten.evals.retrieval_report import RetrievalRun, retrieval_json, retrieval_table
    from subten.formats import KVFormat, get_format

    chosen = named_formats(formats, sinks, recent)
    lengths = _lengths(lines)
    rows_file, _ = result_files(json)

    with progress("loading") as loaded:
        loaded_model = load_model(
            model, dtype=dtype, device=device, kernels=options.kernels(kernel), weights=weights, progress=loaded
        )
    context = loaded_model.spec.max_positions
    lists = write_lists(loaded_model.tokenizer, lengths, trials, seed, context)

    def engine(fmt: KVFormat) -> LLM:
        return LLM(
            loaded_model,
            kv=fmt,
            max_context=lists.longest,
            max_batch=1,
            prefill=prefill,  # type: ignore[arg-type]  # LLM checks it and names the choices
            chunk_size=chunk_size,
        )

    candidates = [engine(fmt) for fmt in chosen if fmt.name != REFERENCE_FORMAT]
    with progress("measuring") as measured:
        results = measure_retrieval(engine(get_format(REFERENCE_FORMAT)), candidates, lists.trials, measured)
    run = RetrievalRun(
        **computed_by(loaded_model),
        context=context,
        omitted=lists.omitted,
        seed=seed,
        prefill=prefill,
        chunk_size=chunk_size,
    )
    show(retrieval_table(results, run))
    if rows_file is not None:
        rows_file.write(retrieval_json(results, run))


def _lengths(lines: str) -> list[int]:
    parts = [part.strip() for part in lines.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ParameterError(f"--lines is '{lines}'; it must be whole numbers separated by commas, such as 50,100")
    return [int(part) for part in parts]
