"""`subten eval generate`: what long greedy texts become with each KV format."""

from __future__ import annotations

from typing import Annotated

import typer

from subten.cli import options
from subten.cli.eval_options import Formats, Json, OptionalText, named_formats, result_files, text_to_measure_on
from subten.cli.terminal import progress, show


def eval_generate(
    model: options.Model,
    text: OptionalText = None,
    formats: Formats = "kv4,kv2",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, cut from places spread over the text.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate after each.")] = 512,
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
    """Compare long greedy texts with those of the 16-bit cache.

    Where the first token differs and whether it was a near tie, how much of the text ends in a loop, and how
    varied it is.
    """
    from subten.engine import LLM, load_model
    from subten.evals.figures import computed_by, sha256_of_text
    from subten.evals.generation import cut_prompts, measure_generation
    from subten.evals.generation_report import GenerationRun, generation_json, generation_table
    from subten.evals.quality import REFERENCE_FORMAT
    from subten.formats import KVFormat, get_format

    chosen = named_formats(formats, sinks, recent)
    rows_file, _ = result_files(json, text=text)
    content = text_to_measure_on(text)

    with progress("loading") as loaded:
        loaded_model = load_model(
            model, dtype=dtype, device=device, kernels=options.kernels(kernel), weights=weights, progress=loaded
        )
    tokenizer = loaded_model.tokenizer
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    cut = cut_prompts(token_ids, prompts, prompt_tokens, tokenizer.bos_prefix)

    def engine(fmt: KVFormat) -> LLM:
        return LLM(
            loaded_model,
            kv=fmt,
            max_context=min(prompt_tokens + tokens, loaded_model.spec.max_positions),
            max_batch=prompts,
            prefill=prefill,  # type: ignore[arg-type]  # LLM checks it and names the choices
            chunk_size=chunk_size,
        )

    candidates = [engine(fmt) for fmt in chosen if fmt.name != REFERENCE_FORMAT]
    with progress("generating") as generated:
        results = measure_generation(engine(get_format(REFERENCE_FORMAT)), candidates, cut, tokens, generated)
    run = GenerationRun(
        **computed_by(loaded_model),
        text_sha256=sha256_of_text(content),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        prefill=prefill,
        chunk_size=chunk_size,
    )
    show(generation_table(results, run))
    if rows_file is not None:
        rows_file.write(generation_json(results, run))
