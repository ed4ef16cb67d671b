"""`subten run`: continue a prompt, answer a message, or chat."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from subten.cli import options
from subten.cli.files import read_stdin
from subten.cli.streaming import stream_answer
from subten.cli.terminal import note, progress, write_text
from subten.cli.threads import suit_threads
from subten.errors import CacheMemoryError, ContextLengthError, ParameterError

if TYPE_CHECKING:
    from subten.engine import LLM, SamplingParams


def run(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text [default: stdin; on a terminal, an interactive chat]."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a message of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Keep tokens this probable relative to the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer. Repeatable.")] = None,
    kv: options.Format = "kv2",
    context: options.Context = None,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    prefill: options.Prefill = "chunk",
    chunk_size: options.ServedChunkSize = None,
    max_kld: options.MaxKLD = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    kernel: options.Kernel = None,
) -> None:
    """Continue a prompt, answer a message, or chat.

    The text is shown as it comes; one line of figures follows on stderr.
    """
    from subten.engine import LLM, SamplingParams
    from subten.formats import get_format

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    interactive = prompt is None and sys.stdin.isatty()
    if system is not None and not (chat or interactive):
        raise ParameterError("--system needs --chat, as a plain prompt has no system message")
    text = read_stdin() if prompt is None and not interactive else prompt
    fmt = get_format(kv, sinks, recent)
    with progress("loading") as loaded:
        llm = LLM(
            model,
            kv=fmt,
            max_context=context,
            max_batch=1,
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
    history = [] if system is None else [{"role": "system", "content": system}]
    if text is None:
        _converse(llm, params, history)
        return
    ids = llm.tokenizer.chat([*history, _message(text)]) if chat else llm.tokenizer.encode(text)
    _answer(llm, ids, params)


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> str:
    answer = stream_answer(llm, prompt, params, write_text)
    write_text("\n")
    note(answer.status())
    return answer.text


def _converse(llm: LLM, params: SamplingParams, history: list[dict[str, str]]) -> None:
    """Turns until the end of input (Ctrl-D). Ctrl-C stops an answer; at the prompt it ends the program.

    A message that can't be answered, such as one that is too long, is said so and forgotten; the chat goes on.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing for input(), where the platform has it

    if not llm.tokenizer.has_chat_template:
        raise ParameterError("the model has no chat template; give a prompt to continue")
    note("Ctrl-D ends the chat, Ctrl-C stops an answer.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        history.append(_message(text))
        try:
            reply = _answer(llm, llm.tokenizer.chat(history), params)
        except KeyboardInterrupt:
            print()
            history.pop()
            continue
        except (ContextLengthError, CacheMemoryError, ParameterError) as error:
            note(f"error: {error}")
            history.pop()
            continue
        history.append({"role": "assistant", "content": reply})
