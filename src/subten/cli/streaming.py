"""An answer that is shown while it is generated, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subten.cli.terminal import size

if TYPE_CHECKING:
    from subten.engine import LLM, CacheUsage, LoadedModel, SamplingParams


@dataclass(frozen=True)
class Answer:
    """A generated text with its measurements.

    Attributes:
        text: the answer.
        token_ids: its tokens.
        prompt_tokens: length of the prompt.
        first_seconds: time to the first token, prefill included.
        decode_seconds: time from the first to the last token.
        usage: what the cache held at the last token.
        weight_bytes: bytes of weights that one decoded token reads.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_seconds: float
    decode_seconds: float
    usage: CacheUsage
    weight_bytes: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding alone; None where there was only one token."""
        decoded = len(self.token_ids) - 1
        return decoded / self.decode_seconds if decoded > 0 and self.decode_seconds > 0 else None

    def status(self) -> str:
        """One line for people."""
        parts = [f"{len(self.token_ids)} tokens"]
        if (rate := self.tokens_per_second) is not None:
            read = rate * (self.weight_bytes + self.usage.held_bytes) / 1e9
            parts.append(f"{rate:.1f} tok/s, {read:.2f} GB/s of weights and cache")
        parts.append(f"prompt of {self.prompt_tokens} in {self.first_seconds:.2f} s")
        parts.append(
            f"cache {size(self.usage.held_bytes)} ({size(self.usage.wide_bytes)} in 16 bit), "
            f"{self.usage.bits_per_element:.2f} bits per element"
        )
        return "; ".join(parts)


def stream_answer(llm: LLM, prompt: Sequence[int], params: SamplingParams, write: Callable[[str], None]) -> Answer:
    """Generate, calling `write` with each piece of text as it comes. Ctrl-C frees the sequence and passes on.

    Raises:
        ContextLengthError: the prompt does not fit.
        SubtenError: what else ended the answer; NumericalError where the model gave NaN or infinite logits.
    """
    pieces: list[str] = []
    token_ids: list[int] = []
    start = time.perf_counter()
    first = last = start
    with closing(llm.stream(prompt, params)) as deltas:
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            last = time.perf_counter()
            first = last if not token_ids else first
            token_ids += delta.token_ids
            pieces.append(delta.text)
            write(delta.text)
    return Answer(
        text="".join(pieces),
        token_ids=tuple(token_ids),
        prompt_tokens=len(prompt),
        first_seconds=first - start,
        decode_seconds=last - first,
        usage=llm.cache_usage(),
        weight_bytes=weight_bytes_per_token(llm.model),
    )


def weight_bytes_per_token(model: LoadedModel) -> int:
    """Bytes of weights that decoding one token alone must read, as they are held: of the experts in each layer those
    that a token visits, of the embedding one row."""
    from subten.models.spec import MoESpec
    from subten.models.weight_bytes import bytes_read

    visited = [block.router.top_k for block in model.spec.feed_forwards if isinstance(block, MoESpec)]
    weights = model.decoder.weights
    return bytes_read(weights, visited) + weights.embedding[0].nbytes
