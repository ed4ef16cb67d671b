"""`subten demo`: a model with the 2-bit cache at work, and what the cache saved and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from subten.cli import options
from subten.cli.streaming import stream_answer
from subten.cli.terminal import note, progress, show, size, write_text
from subten.cli.threads import suit_threads
from subten.errors import ParameterError

if TYPE_CHECKING:
    from subten.engine import LoadedModel

_QUESTION = "Explain in plain words what this text allows and what it forbids."


def demo(
    model: options.Model,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the document in the prompt, at most what fits.")
    ] = 1024,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 128,
    kv: options.Format = "kv2",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Show the small cache at work and what it costs.

    A text is generated with it, then read again with a 16-bit cache and compared. The prompt is the end of a
    public-domain document and a question about it.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    from subten.engine import LLM, SamplingParams, load_model
    from subten.evals.quality import REFERENCE_FORMAT, measure
    from subten.formats import get_format

    params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=max_tokens)
    fmt = get_format(kv)
    with progress("loading") as loaded:
        loaded_model = load_model(model, dtype=dtype, device=device, progress=loaded)
    suit_threads(loaded_model)
    prompt = _prompt(loaded_model, prompt_tokens, max_tokens)
    context = min(loaded_model.spec.max_positions, len(prompt) + max_tokens)
    # The rule of positions alone: what the comparison measures is then what the answer was generated with.
    llm = LLM(loaded_model, kv=fmt, max_context=context, max_batch=1, prefill="window")
    note(f"{loaded_model.name} reads {len(prompt)} tokens and answers, its cache in {fmt.name}:")
    answer = stream_answer(llm, prompt, params, write_text)
    write_text("\n\n")

    window = [*prompt, *answer.token_ids]
    reference = LLM(loaded_model, kv=REFERENCE_FORMAT, max_context=len(window), max_batch=1, prefill="window")
    with progress("comparing with 16 bit") as compared:
        (quality,) = measure(reference, [llm], [window], decode_tail=len(window) // 16, progress=compared)
    usage = quality.windows[0].usage
    coded = fmt.coded_tokens(usage.tokens)
    rate = answer.tokens_per_second
    table = Table(
        title=f"{loaded_model.name}, {usage.tokens} tokens, KV cache {fmt.name}", show_header=False, box=SIMPLE
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens per second", "-" if rate is None else f"{rate:.1f}")
    table.add_row("cache in 16 bit", size(usage.wide_bytes))
    table.add_row("cache as held", f"{size(usage.held_bytes)} ({usage.held_bytes / usage.wide_bytes:.0%})")
    table.add_row("bits per element, all of it", f"{usage.bits_per_element:.2f}")
    table.add_row(f"bits per element, the {coded} coded tokens", f"{llm.layout.coded_bits():.2f}")
    table.add_row("KL divergence from 16 bit", f"{quality.kld.value:.4f} nats per token")
    table.add_row("same most probable token", f"{quality.same_top.value:.1%}")
    show(table)


def _prompt(model: LoadedModel, document_tokens: int, answer_tokens: int) -> list[int]:
    """A document, cut so that question and answer fit behind it into the model's context, and a question."""
    from subten.engine.calibrate import shipped_text

    tokenizer = model.tokenizer

    def ask(document: str) -> list[int]:
        text = f"{document}\n\n{_QUESTION}\n\n"
        if tokenizer.has_chat_template:
            return tokenizer.chat([{"role": "user", "content": text}])
        return tokenizer.encode(text)

    room = model.spec.max_positions - answer_tokens - len(ask(""))
    if room < 1:
        raise ParameterError(
            f"max_tokens is {answer_tokens}; with a context of {model.spec.max_positions} that leaves no room for a "
            "document to ask about"
        )
    # Calibration uses the beginning of this text, the demo its end.
    document = tokenizer.encode(shipped_text(), add_special_tokens=False)[-min(document_tokens, room) :]
    return ask(tokenizer.decode(document))
