"""Commands of `python -m subten.bench` that `subten bench` has too. Nothing here waits for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MISSING_FIGURES = 1


def latency(
    models: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_SHAPE",
            help="Shapes with random weights (mix-32b-a9b, seed-32b-a7b, qwen3-30b-a3b, mixtral-8x7b, olmoe-1b-7b), "
            "or models by name or path; separated by commas.",
        ),
    ],
    batch: Annotated[str, typer.Option(help="Sequences, separated by commas.")] = "1,4,8,16,32",
    context: Annotated[str, typer.Option(help="Tokens of a sequence, such as 2k,32k, separated by commas.")] = (
        "2k,32k,128k"
    ),
    kv: Annotated[str, typer.Option(help="KV formats, separated by commas.")] = "kv2,kv4,bf16",
    moe: Annotated[str, typer.Option(help="fused, unfused, separated by commas.")] = "fused,unfused",
    steps: Annotated[int, typer.Option(min=10, help="Steps that are timed of each.")] = 500,
    largest: Annotated[
        bool, typer.Option("--largest", help="Look for the largest batch of each context, format and kind of MoE.")
    ] = False,
    limit: Annotated[float, typer.Option(min=0, help="Milliseconds that its p99 has to stay below.")] = 10.0,
    experts: Annotated[
        str, typer.Option(help="FP8 experts of shapes with scales by `channel` or `block`.")
    ] = "channel",
    temperature: Annotated[float, typer.Option(help="Of the choice of tokens; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the choice of tokens.")] = 1.0,
    mean_key: Annotated[
        bool, typer.Option("--mean-key", help="Caches of shapes remove a mean key where the format may.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Take a step of each apart by kernels.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Begin nothing more after so many seconds; what is missing says so.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the figures that the file of --json has, and measure the rest.")
    ] = False,
    ahead: Annotated[bool, typer.Option("--ahead/--no-ahead", help="Compile kernels ahead, side by side.")] = True,
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Decode steps of whole models: milliseconds per token, beside what reading the bytes would take.

    The engine's own step, with its CUDA graph, over caches that are filled without a prompt.
    """
    from subten.bench.latency_options import LatencyOptions
    from subten.bench.latency_session import run_latency

    options = LatencyOptions.parse(
        models,
        batch=batch,
        context=context,
        kv=kv,
        moe=moe,
        steps=steps,
        largest=limit if largest else None,
        experts=experts,
        temperature=temperature,
        top_p=top_p,
        mean_key=mean_key,
        profile=profile,
        device=device,
        seconds=seconds,
        ahead=ahead,
        resume=resume,
    )
    if not run_latency(options, json, commit):
        raise typer.Exit(MISSING_FIGURES)


def report(
    results: Annotated[Path, typer.Option(help="Folder with result files.")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="Folder with the README.md to write them into.")] = Path(
        "docs/benchmarks"
    ),
) -> None:
    """Tables and pictures of the documentation, from the result files of a checkout."""
    from subten.bench.publishing import publish

    for path in publish(results, docs):
        print(path)


def itl(
    models: Annotated[str, typer.Argument(metavar="MODEL_OR_SHAPE", help="As for `latency`; separated by commas.")],
    kv: Annotated[str, typer.Option(help="KV formats, separated by commas.")] = "kv2",
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt, such as 128k.")] = "128k",
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Of the prompt's steps; unless given, as the engine has them.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Milliseconds from token to token, or `none`, separated by commas.")
    ] = "none,50",
    streams: Annotated[int, typer.Option(min=1, help="Streams that run beside the prompt.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="After which a prompt is left as it is.")] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Tokens of running streams while a long prompt is computed beside them."""
    from subten.bench.itl import parse_wishes, run_itl
    from subten.engine.llm import CHUNK_SIZES

    size = CHUNK_SIZES["cpu" if device == "cpu" else "cuda"] if chunk_size is None else chunk_size
    wishes = parse_wishes(prompt, size, streams, seconds)
    if not run_itl(models, kv, budget, wishes, json, device, commit):
        raise typer.Exit(MISSING_FIGURES)


def prefill(
    models: Annotated[str, typer.Argument(metavar="MODEL_OR_SHAPE", help="As for `latency`; separated by commas.")],
    kv: Annotated[str, typer.Option(help="KV formats, separated by commas.")] = "kv2",
    context: Annotated[
        str, typer.Option(help="Tokens that the sequence holds before the chunk, such as 0,32k, separated by commas.")
    ] = "0,8k,32k",
    chunk_size: Annotated[str, typer.Option(help="Tokens of the chunk, separated by commas.")] = "256,1024,4096",
    chunks: Annotated[int, typer.Option(min=3, help="That are timed of each.")] = 10,
    profile: Annotated[bool, typer.Option("--profile", help="Take a chunk of each apart by kernels.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Begin nothing more after so many seconds; what is missing says so.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Chunks of prompts behind contexts of a given length: milliseconds and tokens per second, beside what products
    and reading alone would take, and what the host takes to launch them.

    The engine's own step of a prompt, over caches that are filled without one.
    """
    from subten.bench.prefill_session import PrefillOptions, run_prefill

    options = PrefillOptions.parse(
        models,
        kv=kv,
        context=context,
        chunk_size=chunk_size,
        chunks=chunks,
        profile=profile,
        device=device,
        seconds=seconds,
    )
    if not run_prefill(options, json, commit):
        raise typer.Exit(MISSING_FIGURES)
