"""Quality of KV formats on a text, measured through the path that serves requests.

The text is tokenised once and cut into consecutive windows of `context` tokens, each a fresh sequence (begun with
the beginning-of-sequence token where the tokenizer wants one). In every window each position but the last
predicts its following token. Each format and the 16-bit cache run over the same windows: prompt chunks first,
then the last `decode_tail` tokens one at a time, as in decoding.

All runs advance together, chunk by chunk, and each chunk is reduced to a few numbers per token at once: memory
holds one chunk of logits per run, however long the context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from subten.engine import CacheUsage
from subten.errors import NumericalError, ParameterError
from subten.evals.metrics import Comparison, Estimate, compare, mean, perplexity, perplexity_increase
from subten.formats import KVFormat

REFERENCE_FORMAT = "bf16"
"""The format that every other one is compared with."""


class Scorer(Protocol):
    """What is needed of an engine; `subten.engine.LLM` has it."""

    kv: KVFormat

    def score(self, token_ids: Sequence[int], decode_tail: int = 0) -> Iterator[Tensor]:
        """Logits of the serving path, one row per token, in consecutive parts."""

    def cache_usage(self) -> CacheUsage:
        """What the cache held in the latest step."""


@dataclass(frozen=True)
class WindowResult:
    """One window under one format: means over its positions, and what the cache held at its end."""

    nll: float
    nll_16bit: float
    kld: float
    same_top: float
    usage: CacheUsage


@dataclass(frozen=True)
class FormatQuality:
    """One format over all windows of a text."""

    kv: KVFormat
    windows: tuple[WindowResult, ...]

    @property
    def bits_per_element(self) -> float:
        """Measured at the end of the windows, 16-bit tokens and unfilled page slots included."""
        held = sum(w.usage.held_bytes for w in self.windows)
        return 8 * held / sum(w.usage.elements for w in self.windows)

    @property
    def perplexity(self) -> Estimate:
        """Perplexity with this format."""
        return perplexity([w.nll for w in self.windows])

    @property
    def perplexity_16bit(self) -> Estimate:
        """Perplexity of the same tokens with the 16-bit cache."""
        return perplexity([w.nll_16bit for w in self.windows])

    @property
    def ppl_increase(self) -> Estimate:
        """Relative increase of perplexity, as a fraction."""
        return perplexity_increase([w.nll for w in self.windows], [w.nll_16bit for w in self.windows])

    @property
    def kld(self) -> Estimate:
        """Mean KL(16 bit || this format) per position, in nats."""
        return mean([w.kld for w in self.windows]).within(0, math.inf)

    @property
    def same_top(self) -> Estimate:
        """Share of positions at which both find the same token most probable."""
        return mean([w.same_top for w in self.windows]).within(0, 1)


def cut_windows(
    token_ids: Sequence[int], context: int, tokens: int, bos_prefix: Sequence[int] = ()
) -> list[list[int]]:
    """Consecutive windows of exactly `context` tokens, `bos_prefix` included, as many as fit into `tokens`.

    Raises:
        ParameterError: no window fits, or the text is too short for them.
    """
    if context < 2:
        raise ParameterError(f"context is {context}; it must be at least 2, as each token predicts the next")
    if tokens < context:
        raise ParameterError(f"tokens is {tokens}; it must be at least the context, {context}")
    step = context - len(bos_prefix)
    count = tokens // context
    if len(token_ids) < count * step:
        raise ParameterError(
            f"the text has {len(token_ids)} tokens and {count} windows of {context} need {count * step}; "
            f"give a longer text or fewer tokens"
        )
    return [[*bos_prefix, *token_ids[start : start + step]] for start in range(0, count * step, step)]


def measure(
    reference: Scorer,
    candidates: Sequence[Scorer],
    windows: Sequence[Sequence[int]],
    decode_tail: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[FormatQuality]:
    """Run every window through the reference and all candidates.

    Args:
        reference: engine with the 16-bit cache.
        candidates: engines under test, with the reference's chunk size.
        windows: token ids of each window.
        decode_tail: tokens at the end of each window that are decoded one at a time.
        progress: called with (done, total), counted in tokens of all runs.

    Returns:
        One result per candidate, in order.

    Raises:
        NumericalError: a run gave logits that are not finite.
    """
    advance = advancing(progress, (1 + len(candidates)) * sum(len(window) for window in windows))
    by_window = [_measure_window(reference, candidates, w, decode_tail, advance) for w in windows]
    by_candidate = zip(*by_window, strict=True)
    return [FormatQuality(engine.kv, r) for engine, r in zip(candidates, by_candidate, strict=True)]


def advancing(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """`progress` as a function that is called with the number of tokens just done."""
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    return advance


def _measure_window(
    reference: Scorer,
    candidates: Sequence[Scorer],
    window: Sequence[int],
    decode_tail: int,
    advance: Callable[[int], None],
) -> list[WindowResult]:
    following = torch.tensor(window[1:])
    parts: list[list[Comparison]] = [[] for _ in candidates]
    with ExitStack() as stack:
        # Closed at once where a run fails or is interrupted, so that nothing is left in the caches.
        expected, *runs = (
            stack.enter_context(closing(finite_scores(engine, window, decode_tail, advance)))
            for engine in (reference, *candidates)
        )
        done = 0
        for logits_16bit in expected:
            # The last position of the window has nothing to predict.
            target = following[done : done + len(logits_16bit)].to(logits_16bit.device)
            for run, comparisons in zip(runs, parts, strict=True):
                comparisons.append(compare(logits_16bit[: len(target)], next(run)[: len(target)], target))
            done += len(logits_16bit)
        return [_window_result(p, e.cache_usage()) for p, e in zip(parts, candidates, strict=True)]


def finite_scores(
    engine: Scorer, window: Sequence[int], decode_tail: int, advance: Callable[[int], None]
) -> Generator[Tensor]:
    """The engine's scores of a text, part by part; `advance` is called with the number of tokens of each.

    Raises:
        NumericalError: a part is not finite.
    """
    for logits in engine.score(window, decode_tail):
        if not bool(torch.isfinite(logits).all()):
            raise NumericalError(f"the {engine.kv.name} cache gives logits that are not finite on this text")
        advance(len(logits))
        yield logits


def _window_result(parts: Sequence[Comparison], usage: CacheUsage) -> WindowResult:
    def over_window(field: str) -> Tensor:
        return torch.cat([getattr(part, field) for part in parts]).double()

    return WindowResult(
        nll=over_window("nll").mean().item(),
        nll_16bit=over_window("nll_16bit").mean().item(),
        kld=over_window("kld").mean().item(),
        same_top=over_window("same_top").mean().item(),
        usage=usage,
    )
