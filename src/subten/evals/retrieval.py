"""Finding a value again: a list of keys and values in the prompt, then one of its keys.

    key 4821: 93017
    key 1190: 40255
    ...

    key 4821:

Keys and values are random, so that nothing helps but the list, and the asked lines are spread evenly over it. A
small model may fail by itself; so every format is compared with the 16-bit cache on the same prompts, and the log
probability of the right value shows what changed even where no answer is right.

One pass through the serving path measures all of it: the prompt in chunks, then the tokens of the right answer
one at a time. Greedy decoding gives the right answer exactly where each of its tokens is the most probable one
behind the right tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from subten.engine import Tokenizer
from subten.errors import ContextLengthError, ParameterError
from subten.evals.metrics import Estimate, common_prefix, mean, proportion, token_nll
from subten.evals.quality import Scorer, advancing, finite_scores
from subten.formats import KVFormat

MOST_TRIALS = 1000
"""Of a length. All are written and held before the first is asked about, and tell a share to some 3 points."""
_KEYS, _VALUES = range(1000, 10_000), range(10_000, 100_000)


@dataclass(frozen=True)
class Trial:
    """One question.

    Attributes:
        prompt: token ids of the list and the question.
        answer: token ids of the right value and the line break behind it.
        asked: positions of the asked line in the prompt.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    asked: range

    @property
    def length(self) -> int:
        """Tokens of context that it takes."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Lists:
    """Trials by number of lines, and what each list that does not fit the context would take, in tokens."""

    trials: Mapping[int, tuple[Trial, ...]]
    omitted: Mapping[int, int]

    @property
    def longest(self) -> int:
        """Tokens of context that the longest trial takes."""
        return max(trial.length for trials in self.trials.values() for trial in trials)


def write_lists(tokenizer: Tokenizer, lines: Sequence[int], trials: int, seed: int, context: int) -> Lists:
    """Random lists and questions, the same for the same arguments.

    Args:
        tokenizer: the model's.
        lines: lengths of the lists.
        trials: questions for each length, each about a list of its own; 1 to `MOST_TRIALS`.
        seed: of keys and values.
        context: tokens that list, question and answer may take together; longer lists are omitted.

    Raises:
        ContextLengthError: no list fits.
        ParameterError: no lengths, a length out of range, or trials out of range.
    """
    if not 1 <= trials <= MOST_TRIALS:
        raise ParameterError(f"trials is {trials}; it must be 1 to {MOST_TRIALS}")
    if not lines or not all(1 <= count <= len(_KEYS) for count in lines):
        raise ParameterError(f"lines is {list(lines)}; give one or more lengths from 1 to {len(_KEYS)}")
    written = {
        count: tuple(
            _write(tokenizer, count, (2 * t + 1) * count // (2 * trials), f"{seed}/{t}") for t in range(trials)
        )
        for count in sorted(set(lines))
    }
    needed = {count: max(trial.length for trial in of_length) for count, of_length in written.items()}
    if min(needed.values()) > context:
        count = min(needed)
        raise ContextLengthError(
            f"a list of {count} lines takes {needed[count]} tokens and the context is {context}; "
            "ask for shorter lists"
        )
    return Lists(
        trials={count: of_length for count, of_length in written.items() if needed[count] <= context},
        omitted={count: tokens for count, tokens in needed.items() if tokens > context},
    )


def _write(tokenizer: Tokenizer, count: int, asked: int, seed: str) -> Trial:
    draw = random.Random(seed)
    keys, values = draw.sample(_KEYS, count), draw.choices(_VALUES, k=count)
    lines = [f"key {key}: {value}\n" for key, value in zip(keys, values, strict=True)]
    question = "".join(lines) + f"\nkey {keys[asked]}:"
    whole = tokenizer.encode(f"{question} {values[asked]}\n")
    # A token that spans the end of the question belongs to the answer.
    prompt = common_prefix(whole, tokenizer.encode(question))
    start, end = (len(tokenizer.encode("".join(lines[:n]))) for n in (asked, asked + 1))
    return Trial(tuple(whole[:prompt]), tuple(whole[prompt:]), range(start, end))


@dataclass(frozen=True)
class Answer:
    """What a model with one cache says to a question.

    Attributes:
        log_probability: of the right answer as a whole, in nats.
        tokens: the most probable token at each position of the right answer, given the right tokens before it.
    """

    log_probability: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class FormatRetrieval:
    """One format on the lists of one length; `answers` and `answers_16bit` are those to `trials`, in order."""

    kv: KVFormat
    lines: int
    trials: tuple[Trial, ...]
    answers: tuple[Answer, ...]
    answers_16bit: tuple[Answer, ...]

    @property
    def recall(self) -> Estimate:
        """Share of the trials in which greedy decoding gives exactly the right answer."""
        return proportion([a.tokens == t.answer for a, t in zip(self.answers, self.trials, strict=True)])

    @property
    def same_answer(self) -> Estimate:
        """Share of the trials in which greedy decoding gives what it gives with 16 bit.

        A wrong answer of 16 bit counts up to its first wrong token: what would follow it is not measured.
        """
        outcomes = []
        for trial, answer, answer_16bit in zip(self.trials, self.answers, self.answers_16bit, strict=True):
            decided = common_prefix(answer_16bit.tokens, trial.answer) + 1
            outcomes.append(answer.tokens[:decided] == answer_16bit.tokens[:decided])
        return proportion(outcomes)

    @property
    def log_probability(self) -> Estimate:
        """Mean log probability of the right answer, in nats."""
        return mean([answer.log_probability for answer in self.answers])

    @property
    def change(self) -> Estimate:
        """Mean difference of `log_probability` to 16 bit, from paired trials."""
        pairs = zip(self.answers, self.answers_16bit, strict=True)
        return mean([answer.log_probability - other.log_probability for answer, other in pairs])

    @property
    def asked_in_codes(self) -> float:
        """Share of the trials in which the question reads the asked line through the codes from end to end.

        Of the other lines a part lies in the 16-bit windows. 0 for a format that codes nothing.
        """
        sinks = self.kv.sinks
        inside = [
            sinks <= t.asked.start and t.asked.stop <= sinks + self.kv.coded_tokens(len(t.prompt))
            for t in self.trials
        ]
        return 0.0 if self.kv.lossless else sum(inside) / len(inside)


def measure_retrieval(
    reference: Scorer,
    candidates: Sequence[Scorer],
    trials: Mapping[int, Sequence[Trial]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[FormatRetrieval]:
    """Ask every question with the reference's cache and all candidates'.

    Args:
        reference: engine with the 16-bit cache.
        candidates: engines under test.
        trials: the questions, by number of lines.
        progress: called with (done, total), counted in tokens of all runs.

    Returns:
        For each number of lines, the reference and then the candidates.

    Raises:
        NumericalError: a run gave logits that are not finite.
    """
    engines = (reference, *candidates)
    # The last token of an answer has nothing to predict.
    read = sum(trial.length - 1 for of_length in trials.values() for trial in of_length)
    advance = advancing(progress, len(engines) * read)
    results = []
    for lines, of_length in trials.items():
        by_trial = [[_ask(engine, trial, advance) for engine in engines] for trial in of_length]
        by_engine = list(zip(*by_trial, strict=True))
        results += [
            FormatRetrieval(engine.kv, lines, tuple(of_length), answers, by_engine[0])
            for engine, answers in zip(engines, by_engine, strict=True)
        ]
    return results


def _ask(engine: Scorer, trial: Trial, advance: Callable[[int], None]) -> Answer:
    count = len(trial.answer)
    parts = finite_scores(engine, (*trial.prompt, *trial.answer[:-1]), count - 1, advance)
    logits = torch.cat([part[-count:] for part in parts])[-count:]
    nll = token_nll(logits.double().log_softmax(-1), torch.tensor(trial.answer, device=logits.device))
    return Answer(-nll.sum().item(), tuple(logits.argmax(-1).tolist()))
