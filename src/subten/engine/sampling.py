"""From logits to token ids: greedy, or sampled with temperature, top-k, top-p and min-p.

A sampled token is a function of the row's logits, the request's seed and the token's position, and of
nothing else: not of the batch it shares, not of how its prompt was cut into chunks, not of a fork. So there
is no generator that carries a state. The noise for candidate `v` at `position` is a hash of (seed, position,
v), and the Gumbel-max trick turns it into a draw: argmax(logits / temperature + gumbel) is distributed
exactly as softmax(logits / temperature) (Maddison, Tarlow, Minka: A* Sampling, 2014). Its only reduction is a
maximum, so the order in which a device adds numbers up plays no part; top-p alone needs a sum, in float64.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subten.engine.guard import GuardMaker, allowed_tokens
from subten.errors import ParameterError

_WORD = (1 << 64) - 1
_MAX_SEED = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_HEAD = 1024
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20
_LARGEST_BIAS = 100
_LARGEST_PENALTY = 2


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens and when it ends.

    The filters act after the temperature, in the order top-k, top-p, min-p. Lists given for `stop` and
    `stop_token_ids`, and a mapping given for `logit_bias`, are kept as tuples.

    Raises:
        ParameterError: a field outside its range; the message has the field, the value and the range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding, ties going to the lowest token id."""
    top_k: int = 0
    """Keep the `top_k` most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches `top_p` (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens at least `min_p` times as probable as the most probable one."""
    seed: int | None = None
    """Makes the request repeatable; None draws one for the request (`request_seed`)."""
    max_tokens: int = 256
    """At most this many tokens are generated."""
    min_tokens: int = 0
    """Ending tokens and stop strings count only after this many generated tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the request; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    n: int = 1
    """Answers to one prompt, which is computed once. Answer i is the one that `choice_seed(seed, i)` gives alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit) before everything else."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer has already, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the answer has it already, -2 to 2."""
    guard: GuardMaker | None = None
    """Makes what says, token by token, how the answer may go on (guard.py); its word is the last one."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of so many of the most probable ones at its place; None: neither.
    They are the model's own: before bias, temperature and filters."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. All of it is computed then, whatever of it is in the cache."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        self._require("temperature", _number(lambda x: x >= 0), "a finite number of at least 0")
        self._require("top_k", _integer(lambda x: x >= 0), "a whole number of at least 0 (0 keeps all)")
        self._require("top_p", _number(lambda x: 0 < x <= 1), "above 0 and at most 1")
        self._require("min_p", _number(lambda x: 0 <= x <= 1), "between 0 and 1")
        self._require(
            "seed",
            lambda x: x is None or _integer(lambda i: -_MAX_SEED - 1 <= i <= _MAX_SEED)(x),
            "a 64-bit signed whole number or None",
        )
        self._require("max_tokens", _integer(lambda x: x >= 1), "a whole number of at least 1")
        self._require(
            "min_tokens",
            _integer(lambda x: 0 <= x <= self.max_tokens),
            f"a whole number between 0 and max_tokens ({self.max_tokens})",
        )
        self._require(
            "stop",
            lambda x: isinstance(x, tuple) and all(isinstance(s, str) and s for s in x),
            "a tuple of non-empty strings",
        )
        self._require(
            "stop_token_ids",
            lambda x: isinstance(x, tuple) and all(_integer(lambda i: i >= 0)(i) for i in x),
            "a tuple of token ids of at least 0",
        )
        self._require("ignore_eos", lambda x: isinstance(x, bool), "True or False")
        self._require(
            "n", _integer(lambda x: 1 <= x <= _MOST_CHOICES), f"a whole number between 1 and {_MOST_CHOICES}"
        )
        self._require(
            "logit_bias",
            lambda x: isinstance(x, tuple) and all(_is_bias(entry) for entry in x),
            f"token ids of at least 0, each with a number between -{_LARGEST_BIAS} and {_LARGEST_BIAS}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(
                name,
                _number(lambda x: abs(x) <= _LARGEST_PENALTY),
                f"a number between -{_LARGEST_PENALTY} and {_LARGEST_PENALTY}",
            )
        self._require(
            "guard",
            lambda x: x is None or (callable(x) and self.min_tokens == 0),
            "None, or what makes a guard; it decides where the answer may end, so min_tokens must be 0",
        )
        for name in ("logprobs", "prompt_logprobs"):
            self._require(
                name,
                lambda x: x is None or _integer(lambda i: 0 <= i <= _MOST_LOGPROBS)(x),
                f"a whole number between 0 and {_MOST_LOGPROBS}, or None",
            )

    def _require(self, name: str, valid: Callable[[object], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not valid(value):
            raise ParameterError(f"{name} is {value!r}; it must be {allowed}")

    @property
    def penalizes(self) -> bool:
        """Whether what the answer has already counts."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken without any noise."""
        return self.temperature == 0 or self.top_k == 1


def _number(valid: Callable[[float], bool]) -> Callable[[object], bool]:
    return lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and valid(x)


def _integer(valid: Callable[[int], bool]) -> Callable[[object], bool]:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and valid(x)


def _is_bias(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    token_id, bias = entry
    return _integer(lambda x: x >= 0)(token_id) and _number(lambda x: abs(x) <= _LARGEST_BIAS)(bias)


def request_seed(params: SamplingParams) -> int:
    """The seed of one request: its own, or one drawn now, to be kept for the request's whole life."""
    return secrets.randbits(63) if params.seed is None else params.seed


def choice_seed(seed: int, index: int) -> int:
    """The seed of the answer `index` of several to one prompt; that of the first is the request's own."""
    return seed if index == 0 else _mix(_mix(seed ^ _GOLDEN) + index) & _MAX_SEED


@dataclass(frozen=True)
class SampleRow:
    """What sampling needs to know of one sequence of the batch."""

    params: SamplingParams
    seed: int
    """`request_seed(params)`, drawn once per request."""
    position: int
    """The index in the sequence, prompt included, of the token to be sampled."""
    suppressed: tuple[int, ...] = ()
    """Token ids that can't be taken now: the ending ones while `min_tokens` is not reached."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """How often the answer has each token, where that counts (`SamplingParams.penalizes`)."""
    allowed: Tensor | None = None
    """int32 [words], a bit per token id that may come next (guard.py); None allows all."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose one token per row.

    Args:
        logits: float [batch, vocab], finite. Not changed.
        rows: one per row of `logits`.

    Returns:
        int64 [batch] token ids on the device of `logits`.
    """
    scores = logits.float()
    if any(row.suppressed or row.params.logit_bias or row.counts for row in rows):
        scores = scores.clone()
        for index, row in enumerate(rows):
            for token_id, bias in row.params.logit_bias:
                scores[index, token_id] += bias
            _penalize(scores[index], row)
            scores[index, list(row.suppressed)] = -math.inf
    guarded = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
    if guarded:
        at = torch.tensor([index for index, _ in guarded], device=scores.device)
        allowed = allowed_tokens(torch.stack([mask for _, mask in guarded]).to(scores.device), scores.shape[1])
        scores = scores.index_copy(0, at, scores[at].masked_fill(~allowed, -math.inf))
    tokens = scores.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        tokens[at] = _draw(scores[at], [rows[index] for index in drawn])
    return tokens


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Lower, in place, the scores [vocab] of the tokens that the answer has already."""
    if row.counts:
        tokens = torch.tensor(list(row.counts), device=scores.device)
        times = torch.tensor(list(row.counts.values()), dtype=scores.dtype, device=scores.device)
        scores[tokens] -= row.params.presence_penalty + row.params.frequency_penalty * times


def _draw(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    # With the largest score moved to 0, no temperature, however small, can overflow it.
    temperature = torch.tensor([float(row.params.temperature) for row in rows], device=scores.device)
    smallest = torch.finfo(torch.float32).tiny
    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / temperature.clamp_min(smallest)[:, None]
    kept = filter_scores(scaled, [row.params for row in rows])
    return (kept + gumbel([(row.seed, row.position) for row in rows], kept.shape[1], kept.device)).argmax(-1)


def filter_scores(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-k, then top-p to what is left, then min-p.

    Top-k keeps exactly k tokens, top-p the smallest sufficient set; among equal scores the lowest ids stay.

    Args:
        scores: float32 [batch, vocab], logits already divided by the temperature.
        params: one per row.

    Returns:
        float32 [batch, vocab] with -inf where a token is out. The most probable token is never out.
    """
    floor = torch.tensor([_log(p.min_p) for p in params], dtype=scores.dtype, device=scores.device)[:, None]
    kept = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, -math.inf)
    sorting = [index for index, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if sorting:
        at = torch.tensor(sorting, device=scores.device)
        out = ~_most_probable(scores[at], [params[index] for index in sorting])
        kept[at] = kept[at].masked_fill(out, -math.inf)
    return kept


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _most_probable(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """bool [batch, vocab]: the tokens that top-k and top-p keep.

    A nucleus is nearly always small, so the head of the ranking is looked at first and all of it only if need be:
    at a vocabulary of 49152 on one CPU core that is 2 ms instead of 8. What is kept is the same either way: all
    tokens above the last kept score, and of those that tie with it the lowest ids.
    """
    vocab = scores.shape[1]
    wanted = [min(p.top_k or vocab, vocab) for p in params]
    top_k = torch.tensor(wanted, device=scores.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scores.device)[:, None]
    probability = scores.double().softmax(dim=-1)
    for head in (min(vocab, max(_HEAD, *(k for k in wanted if k < vocab), 1)), vocab):
        ranked, tokens = scores.topk(head, dim=-1)
        within = torch.arange(head, device=scores.device) < top_k
        mass = probability.gather(1, tokens).masked_fill(~within, 0)
        reached = mass.cumsum(dim=-1)
        total = torch.where(top_k < vocab, reached[:, -1:], 1.0)
        # A top_p of 1 asks for everything; rounding of the sum must not drop the last tokens.
        kept = (within & ((reached - mass < top_p * total) | (top_p == 1))).sum(dim=-1, keepdim=True)
        if bool(((kept < head) | (top_k < vocab)).all()):
            break
    last = ranked.gather(1, kept - 1)
    ties = scores == last
    allowed = kept - (ranked > last).sum(dim=-1, keepdim=True)
    return (scores > last) | (ties & (ties.cumsum(dim=-1) <= allowed))


def gumbel(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise as a hash of (seed, position, token id).

    The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): a
    counter times the golden ratio, mixed; seed and position are mixed into its starting point.

    Args:
        keys: (seed, position) per row.
        vocab: length of a row.
        device: where the noise is needed; the hash is the same on all devices, the two logarithms may
            differ in their last bit.

    Returns:
        float32 [rows, vocab], finite.
    """
    starts = [_signed(_mix(_mix(seed) + position)) for seed, position in keys]
    counter = torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    word = torch.tensor(starts, dtype=torch.int64, device=device)[:, None] + counter
    for shift, factor in ((30, _signed(_MIX_1)), (27, _signed(_MIX_2))):
        word = (word ^ _shift_right(word, shift)) * factor
    word = word ^ _shift_right(word, 31)
    # 63 bits as a float32 keep full relative precision near 0, where the winners of the race are.
    uniform = (_shift_right(word, 1).float() * 2.0**-63).clamp(2.0**-64, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(word: int) -> int:
    """SplitMix64 of one Python integer, modulo 2**64."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The same 64 bits as the int64 that torch takes."""
    return word - (1 << 64) if word > _MAX_SEED else word


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """A logical shift: int64 has only the arithmetic one, which copies the sign bit."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
