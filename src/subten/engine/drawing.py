"""Tokens drawn from scores, with everything that decides it in device memory: the host is not asked.

The noise for candidate `v` at `position` is a hash of (seed, position, v), so that there is no generator that carries
a state, and the Gumbel-max trick turns it into a draw: argmax(logits / temperature + gumbel) is distributed exactly
as softmax(logits / temperature) (Maddison, Tarlow, Minka: A* Sampling, 2014). Its only reduction is a maximum, so the
order in which a device adds numbers up plays no part; top-p alone needs a sum, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = 1 << 62
"""As `Knobs.top_k`: all tokens."""
GOLDEN = 0x9E3779B97F4A7C15
"""Golden ratio, times 2^64: what SplitMix64 counts by."""
_WORD = (1 << 64) - 1
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_HEAD = 1024


@dataclass(frozen=True)
class Knobs:
    """How rows are drawn, an element for each.

    Attributes:
        temperature: float32, divides the scores; 0 takes the highest score, ties going to the lowest token id.
        floor: float32, logarithm of the smallest probability that is kept, relative to the largest.
        top_k: int64, tokens that are kept; `UNLIMITED` keeps all.
        top_p: float64, mass of the most probable tokens that are kept.
        seed: int64, the request's, mixed (`mix`).
        ranked: whether some row has a top_k or top_p. Where none has, nothing is ranked.
    """

    temperature: Tensor
    floor: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    ranked: bool

    def first(self, count: int, *, ranked: bool) -> Knobs:
        """Of the first rows, as views."""
        return Knobs(
            self.temperature[:count], self.floor[:count], self.top_k[:count], self.top_p[:count], self.seed[:count],
            ranked,
        )  # fmt: skip


def choose(scores: Tensor, knobs: Knobs, positions: Tensor, *, noise: bool) -> Tensor:
    """A token per row, int64 [batch]; without `noise` all rows' temperatures are 0.

    Args:
        scores: float32 [batch, vocab], at least one of a row finite.
        knobs: one element per row.
        positions: int64 [batch], of the tokens that are drawn.
        noise: whether some row is drawn.
    """
    highest = scores.argmax(dim=-1)
    return torch.where(knobs.temperature == 0, highest, draw(scores, knobs, positions)) if noise else highest


def draw(scores: Tensor, knobs: Knobs, positions: Tensor) -> Tensor:
    """As `choose`, for rows whose temperatures are not 0."""
    # With the largest score moved to 0, no temperature, however small, can overflow it.
    smallest = torch.finfo(torch.float32).tiny
    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / knobs.temperature.clamp_min(smallest)[:, None]
    kept = filter_scores(scaled, knobs)
    return (kept + gumbel(knobs.seed, positions, kept.shape[1])).argmax(-1)


def filter_scores(scores: Tensor, knobs: Knobs) -> Tensor:
    """Apply top-k, then top-p to what is left, then min-p.

    Top-k keeps exactly k tokens, top-p the smallest sufficient set; among equal scores the lowest ids stay.

    Args:
        scores: float32 [batch, vocab], logits already divided by the temperature.
        knobs: one element per row.

    Returns:
        float32 [batch, vocab] with -inf where a token is out. The most probable token is never out.
    """
    out = scores < scores.amax(dim=-1, keepdim=True) + knobs.floor[:, None]
    if knobs.ranked:
        out |= ~_most_probable(scores, knobs.top_k[:, None], knobs.top_p[:, None])
    return scores.masked_fill(out, -math.inf)


def _most_probable(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """bool [batch, vocab]: the tokens that top-k and top-p keep.

    A nucleus is nearly always small. So on a CPU the head of the ranking is looked at first, and all of it only if
    need be: at a vocabulary of 49152 on one core that is 2 ms instead of 8. A GPU would have to wait for the host to
    find out. What is kept is the same either way: all tokens above the last kept score, and of those that tie with it
    the lowest ids.
    """
    vocab = scores.shape[1]
    everything = (top_k >= vocab) & (top_p == 1)
    probability = scores.double().softmax(dim=-1)
    for head in (vocab,) if scores.is_cuda else (min(vocab, _HEAD), vocab):
        ranked, tokens = scores.topk(head, dim=-1)
        within = torch.arange(head, device=scores.device) < top_k
        mass = probability.gather(1, tokens).masked_fill(~within, 0)
        reached = mass.cumsum(dim=-1)
        total = torch.where(top_k < vocab, reached[:, -1:], 1.0)
        # A top_p of 1 asks for everything; rounding of the sum must not drop the last tokens.
        kept = (within & ((reached - mass < top_p * total) | (top_p == 1))).sum(dim=-1, keepdim=True)
        kept = kept.clamp_min(1)  # The smallest top_p times a total below 1 is 0.
        if head == vocab or bool((everything | ((kept < head) & ((top_k <= head) | (top_k >= vocab)))).all()):
            break
    # In a row that is not finite nothing is kept, and its token means nothing.
    last = ranked.gather(1, kept - 1)
    ties = scores == last
    allowed = kept - (ranked > last).sum(dim=-1, keepdim=True)
    return everything | (scores > last) | (ties & (ties.cumsum(dim=-1) <= allowed))


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise as a hash of (seed, position, token id).

    The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): a
    counter times the golden ratio, mixed; seed and position are mixed into its starting point.

    Args:
        seeds: int64 [rows], mixed.
        positions: int64 [rows].
        vocab: length of a row.

    Returns:
        float32 [rows, vocab], finite. The hash is the same on all devices, the two logarithms may differ in their
        last bit.
    """
    counter = torch.arange(1, vocab + 1, dtype=torch.int64, device=seeds.device) * signed(GOLDEN)
    start = _finished(seeds + positions + signed(GOLDEN))
    word = _finished(start[:, None] + counter)
    # 63 bits as a float32 keep full relative precision near 0, where the winners of the race are.
    uniform = (_shift_right(word, 1).float() * 2.0**-63).clamp(2.0**-64, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def mix(word: int) -> int:
    """SplitMix64 of one Python integer, modulo 2**64."""
    word = (word + GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def signed(word: int) -> int:
    """The same 64 bits as the int64 that torch takes."""
    return word - (1 << 64) if word >> 63 else word


def _finished(word: Tensor) -> Tensor:
    """What SplitMix64 does to its counter."""
    for shift, factor in ((30, signed(_MIX_1)), (27, signed(_MIX_2))):
        word = (word ^ _shift_right(word, shift)) * factor
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """A logical shift: int64 has only the arithmetic one, which copies the sign bit."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
