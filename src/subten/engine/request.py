"""One request: what was asked, what has been computed, and why it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from subten.engine.decode_rows import Draw
from subten.engine.guard import TokenGuard, guarding
from subten.engine.logprobs import TokenLogprobs, token_logprobs
from subten.engine.sampling import SampleRow, SamplingParams
from subten.engine.stops import StopMatcher
from subten.engine.tokenizer import DecodeStream, Tokenizer
from subten.errors import SubtenError
from subten.kvcache import SavedSequence

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer. `text` may lag behind `token_ids`, never runs ahead.

    `logprobs` has one entry per token where they were asked for; `index` says which of the `n` answers it is; `error`
    is with the last one, if that is what ended the answer.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    error: SubtenError | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the answer, the ending token included.
        text: the answer without ending token and stop string.
        finish_reason: "stop" (ending token or stop string), "length" (max_tokens or the end of the context),
            "error" (this request failed; the others of its batch did not), "cancelled".
        stop_reason: the stop string or token id, the error's sentence, or None.
        cached_tokens: prompt tokens that were taken from the cache instead of being computed.
        logprobs: one entry per token, where they were asked for.
        index: which of the `n` answers to the prompt it is.
        prompt_logprobs: one entry per token of the prompt, where they were asked for; None for the first, which
            nothing predicts.
        error: what ended it, where it is an error; it can be raised.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    error: SubtenError | None = None


@dataclass(eq=False)
class Request:
    """The state of one answer from arrival to end."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokenizer: Tokenizer
    max_length: int
    """Prompt and answer together may not grow beyond this."""
    seed: int
    arrival: int
    """Its place among all requests, by which they are served."""
    index: int = 0
    """Which of the answers to the prompt it is."""
    sequence: int | None = None
    """Its sequence in the cache's books, while it has one."""
    cached: int = 0
    """Tokens that are in the cache."""
    reused: int = 0
    """Prompt tokens that were in the cache when it began."""
    saved: SavedSequence | None = None
    """Its sequence outside the cache, while it waits to go on."""
    branches: list[Request] = field(default_factory=list)
    """Requests of the same prompt that begin where its prompt has been computed."""
    output: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: SubtenError | None = None
    guard: TokenGuard | None = None
    """Says how the answer may go on; made from the parameters unless it is a branch's of a guarded answer."""
    deltas: list[Delta] = field(default_factory=list)
    """Deltas that no consumer has taken yet."""

    def __post_init__(self) -> None:
        self._decode = DecodeStream(self.tokenizer, self.prompt)
        self._stops = StopMatcher(self.params.stop)
        ending = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            ending |= self.tokenizer.eos_token_ids
        self._ending = frozenset(ending)
        self._emitted = 0
        self.draw = Draw(self.params, self.seed)
        wants = self.params
        self._simple = wants.guard is None and wants.logprobs is None and not (wants.penalizes or wants.logit_bias)
        self._counts: Counter[int] = Counter()
        if self.guard is None and self.params.guard is not None:
            with guarding():
                self.guard = self.params.guard()
        self._simple &= self.guard is None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt are still to be computed."""
        return self.cached < len(self.prompt)

    @property
    def ready(self) -> bool:
        """Whether everything up to the newest token has been computed, so that the next one can be sampled."""
        return self.cached == self.length

    def take_prompt(self, start: int, end: int, logits: Tensor) -> None:
        """Report what the model thought of tokens of the prompt.

        Args:
            start: first position that has been computed.
            end: the position behind the last one.
            logits: float32 [end - start, vocab], each of the token behind its position.
        """
        count = self.params.prompt_logprobs
        following = self.prompt[start + 1 : end + 1]
        if start == 0:
            self.prompt_logprobs = [None]
        if following:
            self.prompt_logprobs += token_logprobs(logits[: len(following)], following, [count] * len(following))

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start..end-1, prompt and answer being one sequence."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    def token(self, position: int) -> int:
        """Token id of one position, prompt and answer being one sequence."""
        behind = position - len(self.prompt)
        return self.prompt[position] if behind < 0 else self.output[behind]

    @property
    def simple(self) -> bool:
        """Whether the next token depends on nothing but the logits and `draw`, and nobody asks for more than it."""
        return self._simple and len(self.output) >= self.params.min_tokens

    def sample_row(self) -> SampleRow:
        """What sampling must know to choose the next token.

        Raises:
            GuardError: the guard has failed.
        """
        unfinished = len(self.output) < self.params.min_tokens
        suppressed = tuple(self._ending) if unfinished else ()
        with guarding():
            allowed = None if self.guard is None else self.guard.allowed()
        return SampleRow(self.params, self.seed, self.length, suppressed, self._counts, allowed)

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Add a sampled token: its text, and whether it ends the request.

        Raises:
            GuardError: the guard has failed.
        """
        self.output.append(token_id)
        if self.params.penalizes:
            self._counts[token_id] += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        complete = False
        if self.guard is not None:
            with guarding():
                self.guard.accept(token_id)
                complete = self.guard.finished
        if token_id in self._ending:
            self._finish("stop", token_id if token_id in self.params.stop_token_ids else None)
            return
        piece = self._decode.push(token_id)
        if len(self.output) > self.params.min_tokens:
            piece = self._stops.push(piece)
        if self._stops.matched is not None:
            self._emit(piece, "stop", self._stops.matched)
        elif complete:
            self._finish("stop", None, piece)
        elif len(self.output) == self.params.max_tokens or self.length == self.max_length:
            self._finish("length", None, piece)
        else:
            self._emit(piece, None, None)

    def fail(self, error: SubtenError) -> None:
        """End the request because of an error that is its own, and what was to branch off its prompt with it."""
        self.error = error
        self._emit("", "error", str(error))
        for branch in self.branches:
            if branch.finish_reason is None:
                branch.fail(error)
        self.branches = []

    def cancel(self) -> None:
        """End the request because nobody waits for it any more. Where it has ended already, nothing changes."""
        if self.finish_reason is None:
            self._emit("", "cancelled", None)

    def completion(self) -> Completion:
        """The result of a finished request."""
        assert self.finish_reason is not None, "the request is not finished"
        return Completion(
            self.prompt,
            tuple(self.output),
            self.text,
            self.finish_reason,
            self.stop_reason,
            self.reused,
            tuple(self.logprobs),
            self.index,
            tuple(self.prompt_logprobs),
            self.error,
        )

    def _finish(self, reason: FinishReason, stop_reason: str | int | None, piece: str = "") -> None:
        """End with the text that was held back: half a character, or the beginning of a stop string."""
        piece += self._stops.push(self._decode.finish())
        if self._stops.matched is not None:
            reason, stop_reason = "stop", self._stops.matched
        else:
            piece += self._stops.finish()
        self._emit(piece, reason, stop_reason)

    def _emit(self, piece: str, reason: FinishReason | None, stop_reason: str | int | None) -> None:
        self.text += piece
        self.finish_reason, self.stop_reason = reason, stop_reason
        new = slice(self._emitted, len(self.output))
        self._emitted = new.stop
        tokens, logprobs = tuple(self.output[new]), tuple(self.logprobs[new])
        self.deltas.append(Delta(piece, tokens, reason, logprobs, self.index, self.error))
