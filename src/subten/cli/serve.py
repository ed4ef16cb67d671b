"""`subten serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from subten.cli import options
from subten.cli.terminal import progress
from subten.cli.threads import suit_threads
from subten.errors import ExtraMissingError, ParameterError


def serve(
    model: options.Model,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [default: 8000].")] = None,
    kv: options.Format = "kv2",
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer [default: what the model and memory allow].")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Answers that are computed together.")] = 8,
    itl_budget_ms: Annotated[
        float | None, typer.Option(help="Milliseconds between two tokens of a stream that prompts have to leave.")
    ] = None,
    reserve: Annotated[
        int | None, typer.Option(help="Tokens set aside for each answer [default: the longest answer].")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(help="Idle conversations to keep [default: twice the batch].")
    ] = None,
    session_ttl: Annotated[float, typer.Option(help="Seconds for which an idle conversation is kept.")] = 3600.0,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key per line.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that requests give as `model` [default: the model's].")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Answers that may wait [default: 128].")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest request body [default: 4194304].")] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="How long answers may go on after SIGTERM [default: 4].")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the server. Repeatable.")
    ] = None,
    log_prompts: Annotated[
        bool | None, typer.Option("--log-prompts", help="Write prompts and answers into the log.")
    ] = None,
    prefill: options.Prefill = "chunk",
    chunk_size: options.ServedChunkSize = None,
    max_kld: options.MaxKLD = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    kernel: options.Kernel = None,
) -> None:
    """Serve a model over HTTP, as OpenAI does.

    Options about the server, but not those about the model, may come from the environment: --port from
    SUBTEN_SERVE_PORT. SIGTERM ends the server.
    """
    try:
        from subten.server.keys import read_keys
        from subten.server.logs import log_json_lines
        from subten.server.process import listen, run
    except ModuleNotFoundError as error:
        raise ExtraMissingError(f"serving needs {error.name}; install subten[serve]") from error
    from subten.engine import LLM

    given = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "api_key_file": api_key_file,
        "allowed_origins": tuple(allowed_origin) if allowed_origin else None,
        "max_queue": max_queue,
        "max_body_bytes": max_body_bytes,
        "drain_seconds": drain_seconds,
        "log_prompts": log_prompts,
    }
    settings = _settings({name: value for name, value in given.items() if value is not None})
    # What is wrong with keys and port is said before a model is loaded.
    keys = read_keys(settings.api_key_file)
    with listen(settings) as sockets:
        log_json_lines()
        with progress("loading") as loaded:
            llm = LLM(
                model,
                kv=kv,
                max_context=max_context,
                max_batch=max_batch,
                itl_budget_ms=itl_budget_ms,
                reserve=reserve,
                sessions=2 * max(0, max_batch) if sessions is None else sessions,
                session_ttl=session_ttl,
                prefill=prefill,  # type: ignore[arg-type]  # LLM checks it and names the choices
                chunk_size=chunk_size,
                max_kld=max_kld,
                dtype=dtype,
                device=device,
                kernels=options.kernels(kernel),
                weights=weights,
                progress=loaded,
            )
        suit_threads(llm.model)
        run(llm, settings, sockets, keys)


def _settings(given: dict[str, Any]) -> Any:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from subten.server.settings import ENVIRONMENT, ServerSettings

    try:
        return ServerSettings(**given)
    except SettingsError as error:
        raise ParameterError(f"{error}: a list is JSON there, such as '[\"http://localhost:3000\"]'") from error
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        variable = "" if problem["loc"][0] in given else f" in {ENVIRONMENT}{str(problem['loc'][0]).upper()}"
        raise ParameterError(f"the setting {name} is {problem['input']!r}{variable}: {problem['msg']}") from error
