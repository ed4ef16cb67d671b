"""Long greedy continuations with each KV format: where they leave the 16-bit one, and whether they end in a loop.

Once one token differs, the texts are different texts, and nothing that follows can be compared token by token. So
two things are reported: where the first difference is and how close the choice was there, and figures of each
text by itself. Ending tokens are passed over: every text has the same length.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from subten.engine import Delta, SamplingParams
from subten.errors import ContextLengthError, NumericalError, ParameterError
from subten.evals.metrics import Estimate, common_prefix, mean
from subten.evals.quality import Scorer, advancing, finite_scores
from subten.formats import KVFormat

NEAR_TIE = 0.1
"""Nats: tokens whose log probabilities differ by less are a near tie (one is up to 10% more probable)."""
LONGEST_PERIOD, REPEATS = 128, 3
"""A loop repeats up to so many tokens, at least so many times in a row. Small models repeat whole paragraphs."""
DISTINCT = (1, 2, 3)
"""The n-grams that are counted."""


class Writer(Scorer, Protocol):
    """What is needed of an engine; `subten.engine.LLM` has it."""

    max_context: int

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Generator[Delta, None, None]:
        """The continuation of a prompt, piece by piece."""


@dataclass(frozen=True)
class Divergence:
    """The first token in which a text differs from the 16-bit one.

    Attributes:
        position: tokens before it.
        gap: by how much the 16-bit run found its own token more probable than the other one, in nats.
    """

    position: int
    gap: float


@dataclass(frozen=True)
class FormatTexts:
    """What one format wrote: a continuation of each prompt, and where it left the 16-bit one (None: nowhere)."""

    kv: KVFormat
    texts: tuple[tuple[int, ...], ...]
    divergences: tuple[Divergence | None, ...]

    @property
    def same_tokens(self) -> Estimate:
        """Mean number of tokens before the first difference; a text without one counts whole."""
        length = len(self.texts[0])
        return mean([length if d is None else d.position for d in self.divergences]).within(0, length)

    @property
    def identical(self) -> int:
        """Texts without a difference."""
        return self.divergences.count(None)

    @property
    def gaps(self) -> list[float]:
        """The gaps of all differences."""
        return [divergence.gap for divergence in self.divergences if divergence is not None]

    @property
    def near_ties(self) -> int:
        """Texts whose first difference was a near tie in the 16-bit run."""
        return sum(gap < NEAR_TIE for gap in self.gaps)

    @property
    def median_gap(self) -> float | None:
        """Median gap of the differences; None where there is none."""
        return statistics.median(self.gaps) if self.gaps else None

    @property
    def loop_rate(self) -> Estimate:
        """Mean share of a text's tokens that lie in a loop at its end (`looping_tokens`)."""
        return mean([looping_tokens(text) / len(text) for text in self.texts]).within(0, 1)

    def distinct(self, n: int) -> Estimate:
        """Mean share of a text's n-grams that are different from each other."""
        return mean([distinct_ngrams(text, n) for text in self.texts]).within(0, 1)


def looping_tokens(token_ids: Sequence[int]) -> int:
    """Length of the longest end of a text that is at least `REPEATS` repetitions of up to `LONGEST_PERIOD` tokens.

    It may begin in the middle of a repetition: an end of 7 tokens that repeats 2 tokens is 3.5 of them.
    """
    longest = 0
    for period in range(1, min(LONGEST_PERIOD, len(token_ids) // REPEATS) + 1):
        length = period + common_prefix(token_ids[::-1], token_ids[-period - 1 :: -1])
        if length >= REPEATS * period:
            longest = max(longest, length)
    return longest


def distinct_ngrams(token_ids: Sequence[int], n: int) -> float:
    """Different n-grams over n-grams (Li et al., arXiv:1510.03055); 1 where the text has no n tokens."""
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def cut_prompts(token_ids: Sequence[int], count: int, length: int, bos_prefix: Sequence[int] = ()) -> list[list[int]]:
    """Prompts of `length` tokens, `bos_prefix` included, from places that are spread evenly over a text.

    Raises:
        ParameterError: the text is too short for prompts that do not overlap, or a number is out of range.
    """
    taken = length - len(bos_prefix)
    if count < 1 or taken < 1:
        raise ParameterError(f"{count} prompts of {length} tokens can't be cut; both must be 1 or more")
    if len(token_ids) < count * taken:
        raise ParameterError(
            f"the text has {len(token_ids)} tokens and {count} prompts of {length} need {count * taken}; "
            "give a longer text, or fewer or shorter prompts"
        )
    starts = [index * len(token_ids) // count for index in range(count)]
    return [[*bos_prefix, *token_ids[start : start + taken]] for start in starts]


def measure_generation(
    reference: Writer,
    candidates: Sequence[Writer],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[FormatTexts]:
    """Continue every prompt with the reference's cache and all candidates'.

    Args:
        reference: engine with the 16-bit cache.
        candidates: engines under test, with the reference's batch and chunk sizes, so that sums are rounded alike.
        prompts: token ids of each prompt.
        tokens: length of the continuations.
        progress: called with (done, total), counted in generated tokens of all runs.

    Returns:
        The reference and then the candidates.

    Raises:
        ContextLengthError: a prompt and its continuation do not fit the context.
        NumericalError: a run gave logits that are not finite.
    """
    engines = (reference, *candidates)
    longest = max(len(prompt) for prompt in prompts) + tokens
    context = min(engine.max_context for engine in engines)
    if longest > context:
        raise ContextLengthError(
            f"a prompt and its continuation take {longest} tokens and the context is {context}; ask for fewer tokens"
        )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    advance = advancing(progress, len(engines) * len(prompts) * tokens)
    texts = [_continue(engine, prompts, params, advance) for engine in engines]
    by_prompt = [
        _divergences(reference, prompt, written)
        for prompt, written in zip(prompts, zip(*texts, strict=True), strict=True)
    ]
    by_engine = zip(*by_prompt, strict=True)
    return [FormatTexts(e.kv, t, d) for e, t, d in zip(engines, texts, by_engine, strict=True)]


def _continue(
    engine: Writer, prompts: Sequence[Sequence[int]], params: SamplingParams, advance: Callable[[int], None]
) -> tuple[tuple[int, ...], ...]:
    texts: list[list[int]] = [[] for _ in prompts]
    with ExitStack() as stack:
        # Closed at once where a run fails or is interrupted, so that nothing is left in the cache.
        streams = [stack.enter_context(closing(engine.stream(prompt, params))) for prompt in prompts]
        # They take turns; the engine computes all that have begun in one batch.
        for deltas in zip_longest(*streams):
            for text, delta in zip(texts, deltas, strict=True):
                if delta is None:
                    continue
                if delta.finish_reason == "error":
                    raise NumericalError(f"the {engine.kv.name} cache gives logits that are not finite on this text")
                text += delta.token_ids
                advance(len(delta.token_ids))
    return tuple(tuple(text) for text in texts)


def _divergences(
    reference: Scorer, prompt: Sequence[int], texts: Sequence[Sequence[int]]
) -> tuple[Divergence | None, ...]:
    """Of each text, its first difference from the first of them, which is the 16-bit text."""
    own = texts[0]
    same = [common_prefix(own, text) for text in texts]
    choices = {(position, text[position]) for position, text in zip(same, texts, strict=True) if position < len(own)}
    gaps = _gaps(reference, prompt, own, choices) if choices else {}
    return tuple(
        None if position == len(own) else Divergence(position, gaps[position, text[position]])
        for position, text in zip(same, texts, strict=True)
    )


def _gaps(
    reference: Scorer, prompt: Sequence[int], own: Sequence[int], choices: Set[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """For each (position, token): log probability of the 16-bit run's own token there, minus that of the other."""
    read = [*prompt, *own[: max(position for position, _ in choices)]]
    gaps = {}
    first = len(prompt) - 1
    for logits in finite_scores(reference, read, 0, lambda _tokens: None):
        for position, token in choices:
            row = first + position
            if 0 <= row < len(logits):
                gaps[position, token] = (logits[row, own[position]] - logits[row, token]).item()
        first -= len(logits)
    return gaps
