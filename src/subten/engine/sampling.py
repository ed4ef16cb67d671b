"""From logits to token ids: what a request can ask for, and everything that the host has a say in.

A sampled token is a function of the row's logits, the request's seed and the token's position, and of nothing else:
not of the batch it shares, not of how its prompt was cut into chunks, not of a fork. What is drawn, and how, is
drawing.py.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subten.engine.drawing import GOLDEN, UNLIMITED, Knobs, draw, mix, signed
from subten.engine.guard import GuardMaker, allowed_tokens
from subten.errors import ParameterError

_MAX_SEED = (1 << 63) - 1
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20
_LARGEST_BIAS = 100
_LARGEST_PENALTY = 2
_HOTTEST = torch.finfo(torch.float32).max
"""Beyond, a temperature would be infinite in float32, and a score of -inf divided by it nothing at all."""


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
            lambda x: x is None or callable(x),
            "None, or what makes a guard",
        )
        if self.guard is not None:
            # Told of min_tokens: a client of the server gives a form, and knows of no guard.
            self._require(
                "min_tokens", lambda x: x == 0, "0 where a form or a guard decides where the answer may end"
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
    def ranked(self) -> bool:
        """Whether it takes a ranking of the tokens to know which are kept."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken without any noise."""
        return self.temperature == 0 or self.top_k == 1


def _number(valid: Callable[[float], bool]) -> Callable[[object], bool]:
    return lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and _is_finite(x) and valid(x)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # A whole number that no float can hold.
        return False


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
    return seed if index == 0 else mix(mix(seed ^ GOLDEN) + index) & _MAX_SEED


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

    def permits(self, token_id: int) -> bool:
        """Whether `allowed` has the token. What is sampled where it has none at all is not permitted."""
        if self.allowed is None:
            return True
        word, bit = divmod(token_id, 32)
        return word < len(self.allowed) and bool(int(self.allowed[word]) >> bit & 1)


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
        positions = torch.tensor([rows[index].position for index in drawn], device=logits.device)
        tokens[at] = draw(scores[at], knobs_of([(rows[i].params, rows[i].seed) for i in drawn], at.device), positions)
    return tokens


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Lower, in place, the scores [vocab] of the tokens that the answer has already."""
    if row.counts:
        tokens = torch.tensor(list(row.counts), device=scores.device)
        times = torch.tensor(list(row.counts.values()), dtype=scores.dtype, device=scores.device)
        scores[tokens] -= row.params.presence_penalty + row.params.frequency_penalty * times


def knobs_of(rows: Sequence[tuple[SamplingParams, int]], device: torch.device) -> Knobs:
    """Of rows with these parameters and seeds."""
    return Knobs(
        temperature=torch.tensor(
            [0.0 if p.greedy else min(float(p.temperature), _HOTTEST) for p, _ in rows], device=device
        ),
        floor=torch.tensor([_log(p.min_p) for p, _ in rows], device=device),
        top_k=torch.tensor([min(p.top_k or UNLIMITED, UNLIMITED) for p, _ in rows], device=device),
        top_p=torch.tensor([float(p.top_p) for p, _ in rows], dtype=torch.float64, device=device),
        seed=torch.tensor([signed(mix(seed)) for _, seed in rows], device=device),
        ranked=any(p.ranked for p, _ in rows),
    )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf
