"""One request: what was asked, what has been computed, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from subten.engine.sampling import SampleRow, SamplingParams, request_seed
from subten.engine.stops import StopMatcher
from subten.engine.tokenizer import DecodeStream, Tokenizer

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Delta:
    """What one step added to a request's answer. `text` may lag behind `token_ids`, never runs ahead."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the answer, the ending token included.
        text: the answer without ending token and stop string.
        finish_reason: "stop" (ending token or stop string), "length" (max_tokens or the end of the context),
            "error" (this request failed; the others of its batch did not).
        stop_reason: the stop string or token id, the error's sentence, or None.
        cached_tokens: prompt tokens that were taken from the cache instead of being computed.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    cached_tokens: int


@dataclass
class Request:
    """The state of a request from arrival to end."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokenizer: Tokenizer
    max_length: int
    """Prompt and answer together may not grow beyond this."""
    sequence: int | None = None
    """Its sequence in the cache's books, while it has one."""
    cached: int = 0
    """Tokens that are in the cache."""
    reused: int = 0
    output: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    deltas: list[Delta] = field(default_factory=list)
    """Deltas that no consumer has taken yet."""

    def __post_init__(self) -> None:
        self.seed = request_seed(self.params)
        self._decode = DecodeStream(self.tokenizer, self.prompt)
        self._stops = StopMatcher(self.params.stop)
        ending = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            ending |= self.tokenizer.eos_token_ids
        self._ending = frozenset(ending)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt are still to be computed."""
        return self.cached < len(self.prompt)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start..end-1, prompt and answer being one sequence."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    def sample_row(self) -> SampleRow:
        """What sampling must know to choose the next token."""
        unfinished = len(self.output) < self.params.min_tokens
        return SampleRow(self.params, self.seed, self.length, tuple(self._ending) if unfinished else ())

    def take(self, token_id: int) -> None:
        """Add a sampled token: its text, and whether it ends the request."""
        self.output.append(token_id)
        if token_id in self._ending:
            self._finish("stop", token_id if token_id in self.params.stop_token_ids else None, (token_id,))
            return
        piece = self._decode.push(token_id)
        if len(self.output) > self.params.min_tokens:
            piece = self._stops.push(piece)
        if self._stops.matched is not None:
            self._emit(piece, (token_id,), "stop", self._stops.matched)
        elif len(self.output) == self.params.max_tokens or self.length == self.max_length:
            self._finish("length", None, (token_id,), piece)
        else:
            self._emit(piece, (token_id,), None, None)

    def fail(self, sentence: str) -> None:
        """End the request because of an error that is its own."""
        self._emit("", (), "error", sentence)

    def completion(self) -> Completion:
        """The result of a finished request."""
        assert self.finish_reason is not None, "the request is not finished"
        return Completion(
            self.prompt, tuple(self.output), self.text, self.finish_reason, self.stop_reason, self.reused
        )

    def _finish(
        self, reason: FinishReason, stop_reason: str | int | None, token_ids: Sequence[int], piece: str = ""
    ) -> None:
        """End with the text that was held back: half a character, or the beginning of a stop string."""
        piece += self._stops.push(self._decode.finish())
        if self._stops.matched is not None:
            reason, stop_reason = "stop", self._stops.matched
        else:
            piece += self._stops.finish()
        self._emit(piece, tuple(token_ids), reason, stop_reason)

    def _emit(
        self, piece: str, token_ids: tuple[int, ...], reason: FinishReason | None, stop_reason: str | int | None
    ) -> None:
        self.text += piece
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.deltas.append(Delta(piece, token_ids, reason))
