"""`/v1/completions`: continue one or several prompts."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from subten.engine import DecodeStream, Tokenizer, TokenLogprobs
from subten.errors import ParameterError
from subten.server.answers import Answers, Piece
from subten.server.dependencies import ERRORS, service_of
from subten.server.schema import GenerationRequest, Usage
from subten.server.service import Prompt, Service
from subten.server.streams import respond

DEFAULT_TOKENS = 16
_MOST_PROMPTS = 128

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
ListsOfTokens = Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS)]


class CompletionRequest(GenerationRequest):
    """Prompts to continue: a text, token ids, or several of either."""

    prompt: str | Texts | TokenIds | ListsOfTokens
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Longest answer; 16 by default, and 0 computes the prompt alone."""
    echo: bool | None = None
    """Begin each answer with its prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Report each token's log-probability and those of so many of the most probable ones."""


class CompletionLogprobs(BaseModel):
    """Of the tokens of a text, the prompt's included with `echo`. The first token of all has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


router = APIRouter(prefix="/v1", tags=["generation"], responses=ERRORS)


@router.post("/completions", response_model=Completion)
async def completions(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response | Completion:
    """Continue prompts. With `stream`, as server-sent events."""
    return await respond(
        request, _begin(body, service), stream=bool(body.stream), send_timeout=service.settings.send_timeout
    )


async def _begin(body: CompletionRequest, service: Service) -> _Writer:
    service.check_model(body.model)
    texts = _prompts(body.prompt)

    def encode(tokenizer: Tokenizer) -> list[Prompt]:
        return [_encode(service, tokenizer, text) for text in texts]

    prompts = await service.engine.with_tokenizer(encode)
    # A prompt alone is one token too many, which nobody is shown.
    tokens = None if body.max_tokens is None else max(1, body.max_tokens)
    wanted = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    params = [
        body.sampling(service.room(len(prompt.token_ids), tokens, DEFAULT_TOKENS), **wanted) for prompt in prompts
    ]
    return _Writer(body, service, prompts, await service.answer(prompts, params))


def _prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return (
        [ids]
        if ids
        else [item if isinstance(item, str) else list(item) for item in prompt if not isinstance(item, int)]
    )


def _encode(service: Service, tokenizer: Tokenizer, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        service.check_length(tokenizer, prompt, "prompt")
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise ParameterError("the prompt has no tokens; give it some text")
        return Prompt(tuple(token_ids), prompt)
    known = [token_id for token_id in prompt if token_id < 2**31]
    return Prompt(tuple(prompt), tokenizer.decode(known, skip_special_tokens=False))


_Row = tuple[int, TokenLogprobs | None, int]
"""A token, what was thought of it, and where its text begins."""


class _Offsets:
    """Where the texts of tokens begin, in characters. The parts of a character begin where it does.

    Args:
        tokenizer: of the model.
        stream: makes the text.
        begin: of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stream: DecodeStream, begin: int) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._next = begin

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens."""
        found = []
        for token_id in token_ids:
            spelled, begin = self._tokenizer.token_bytes(token_id), self._next
            self._next += len(self._stream.push(token_id))
            if spelled and spelled[0] & 0xC0 != 0x80:
                # It begins a character. Where one before it was never finished, that has now become U+FFFD.
                own = codecs.getincrementaldecoder("utf-8")("replace").decode(spelled)
                begin = max(begin, self._next - len(own))
            found.append(begin)
        return found


class _Writer:
    """Puts what the engine gives into the endpoint's form."""

    def __init__(
        self,
        body: CompletionRequest,
        service: Service,
        prompts: Sequence[Prompt],
        answers: Answers,
    ) -> None:
        self.answers = answers
        self._body = body
        self._tokenizer = service.tokenizer
        self._prompts = prompts
        self._silent = body.max_tokens == 0
        self._head: dict[str, Any] = {
            "id": f"cmpl-{answers.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._offsets: dict[int, _Offsets] = {}
        """Of each answer's tokens."""

    async def chunks(self) -> AsyncIterator[Completion]:
        """As they come."""
        async for choice in self._choices():
            yield Completion(**self._head, choices=[choice], usage=None)
        if self._body.include_usage:
            yield Completion(**self._head, choices=[], usage=self._usage())

    async def whole(self) -> Completion:
        """All chunks joined."""
        joined: dict[int, CompletionChoice] = {}
        async for piece in self._choices():
            choice = joined.setdefault(piece.index, piece)
            if choice is not piece:
                choice.text += piece.text
                choice.finish_reason = piece.finish_reason
                if choice.logprobs is not None and piece.logprobs is not None:
                    choice.logprobs.tokens += piece.logprobs.tokens
                    choice.logprobs.token_logprobs += piece.logprobs.token_logprobs
                    choice.logprobs.top_logprobs += piece.logprobs.top_logprobs
                    choice.logprobs.text_offset += piece.logprobs.text_offset
        choices = [choice for _, choice in sorted(joined.items())]
        return Completion(**self._head, choices=choices, usage=self._usage())

    def _usage(self) -> Usage:
        usage = self.answers.usage()
        if self._silent:
            return usage.model_copy(update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens})
        return usage

    async def _choices(self) -> AsyncIterator[CompletionChoice]:
        async for piece in self.answers.pieces():
            delta = piece.delta
            prompt, first = self._prompts[piece.prompt], piece.choice not in self._offsets
            if first:
                begin = len(prompt.text) if self._body.echo else 0
                self._offsets[piece.choice] = _Offsets(
                    self._tokenizer, DecodeStream(self._tokenizer, prompt.token_ids), begin
                )
            token_ids, reports = list(delta.token_ids), list(delta.logprobs)
            text = delta.text
            if self._silent:
                token_ids, reports, text = [], [], ""
            logprobs = None
            if self._body.logprobs is not None:
                rows: list[_Row] = list(
                    zip(token_ids, reports, self._offsets[piece.choice].of(token_ids), strict=True)
                )
                logprobs = self._logprobs([*(self._prompt_rows(piece) if first and self._body.echo else []), *rows])
            if first and self._body.echo:
                text = prompt.text + text
            reason: Any = "length" if self._silent and delta.finish_reason else delta.finish_reason
            yield CompletionChoice(index=piece.choice, text=text, logprobs=logprobs, finish_reason=reason)

    def _prompt_rows(self, piece: Piece) -> list[_Row]:
        prompt = self._prompts[piece.prompt]
        reports = self.answers.request(piece.prompt, piece.choice).prompt_logprobs
        # A token that begins every text, and is no part of it, comes before it.
        before = len(prompt.text) - len(self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
        offsets = _Offsets(self._tokenizer, DecodeStream(self._tokenizer, skip_special_tokens=False), before)
        return list(zip(prompt.token_ids, reports, offsets.of(prompt.token_ids), strict=True))

    def _logprobs(self, rows: Sequence[_Row]) -> CompletionLogprobs:
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, report, offset in rows:
            name = self._name(token_id)
            found.tokens.append(name)
            found.text_offset.append(max(0, offset))
            found.token_logprobs.append(None if report is None else report.logprob)
            # The token itself is there too, whether it is one of the most probable or not.
            tops = None if report is None else {self._name(own): logprob for own, logprob in report.top}
            found.top_logprobs.append(tops if tops is None or report is None else {**tops, name: report.logprob})
        return found

    def _name(self, token_id: int) -> str:
        """A token as text; one that is a part of a character is spelled in bytes."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
