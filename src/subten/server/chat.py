"""`/v1/chat/completions`: answer a conversation, in text, in calls of tools, or in JSON of a given form."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from subten.engine import Delta, Tokenizer, TokenLogprobs
from subten.engine.guard import GuardMaker
from subten.errors import EngineStoppedError
from subten.server.answers import Answers, Piece
from subten.server.api_errors import ApiError
from subten.server.chat_prompt import DEFAULT_STOP, chat_text
from subten.server.chat_schema import ChatRequest, JsonSchemaFormat, NamedTool, Tool
from subten.server.dependencies import ERRORS, service_of
from subten.server.schema import Usage
from subten.server.service import Prompt, Service
from subten.server.streams import respond
from subten.server.tools import Arguments, CallStart, Content, Part, ToolCallScanner, answer_format, call_format


class TokenLogprob(BaseModel):
    """A token and its log-probability. `token` is readable, `bytes` exact."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """Of a token of the answer, and of the most probable ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(BaseModel):
    """Of all tokens of an answer, or of a piece of it."""

    content: list[ChosenLogprob]


class Function(BaseModel):
    """What is called, and with what: JSON as text, or in a stream pieces of it."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call. A stream gives `id`, `type` and the name once, with the first piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


class Message(BaseModel):
    """An answer, or what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(BaseModel):
    """A whole answer."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ChatCompletionChunk(BaseModel):
    """A piece of them."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None


router = APIRouter(prefix="/v1", tags=["generation"], responses=ERRORS)


@router.post("/chat/completions", response_model=ChatCompletion, response_model_exclude_unset=True)
async def chat_completions(
    body: ChatRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response | ChatCompletion:
    """Answer a conversation. With `stream`, as server-sent events."""
    return await respond(
        request, _begin(body, service), stream=bool(body.stream), send_timeout=service.settings.send_timeout
    )


async def _begin(body: ChatRequest, service: Service) -> _Writer:
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    guard = await _guard(body, service)
    conversations = service.conversations

    def encode(tokenizer: Tokenizer) -> Prompt:
        # Templates take their time over many messages, so that they too have no place in the event loop.
        text = chat_text(tokenizer, body)
        service.check_length(tokenizer, text, "messages")
        return Prompt(conversations.encode(tokenizer, text), text)

    prompt = await service.engine.with_tokenizer(encode)
    params = body.sampling(
        service.room(len(prompt.token_ids), body.longest_answer),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guard=guard,
        stop=() if service.tokenizer.has_chat_template else DEFAULT_STOP,
    )
    return _Writer(body, service, prompt, await service.answer([prompt], [params]))


async def _guard(body: ChatRequest, service: Service) -> GuardMaker | None:
    """What holds the answer to the form that was asked for."""
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise ApiError(
                400, f"tool_choice names '{choice.function.name}', which is not in tools", param="tool_choice"
            )
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is 'required', but there are no tools", param="tool_choice")
    form = body.response_format
    if tools and choice != "none":
        if form is not None and form.type != "text":
            raise ApiError(400, "response_format and tools exclude each other; give one", param="response_format")
        calls = [call_format(tool.function.name, _parameters(tool)) for tool in tools]
        required = choice == "required" or isinstance(choice, NamedTool)
        parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return await service.grammars.guard(answer_format(calls, required=required, parallel=parallel), "tools")
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else {"type": "object"}
    return await service.grammars.guard(
        {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}, "response_format"
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type") != "object":
        raise ApiError(400, f"the parameters of tool '{tool.function.name}' are no object", param="tools")
    return parameters


class _Writer:
    """Puts what the engine gives into the endpoint's form."""

    def __init__(self, body: ChatRequest, service: Service, prompt: Prompt, answers: Answers) -> None:
        self.answers = answers
        self._body = body
        self._service = service
        self._prompt = prompt
        self._scanners: dict[int, ToolCallScanner] = {}
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{answers.id}",
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """As they come."""
        head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        async for choice in self._choices():
            yield ChatCompletionChunk(**head, choices=[choice], usage=None)
        if self._body.include_usage:
            yield ChatCompletionChunk(**head, choices=[], usage=self.answers.usage())

    async def whole(self) -> ChatCompletion:
        """All chunks joined."""
        joined: dict[int, Choice] = {}
        async for piece in self._choices():
            if piece.index not in joined:
                message = Message(role="assistant", content=None)
                joined[piece.index] = Choice(index=piece.index, message=message, logprobs=None, finish_reason=None)
            _join(joined[piece.index], piece)
        choices = [choice for _, choice in sorted(joined.items())]
        return ChatCompletion(**self._head, object="chat.completion", choices=choices, usage=self.answers.usage())

    async def _choices(self) -> AsyncIterator[ChunkChoice]:
        async for piece in self.answers.pieces():
            first = piece.choice not in self._scanners
            scanner = self._scanners.setdefault(piece.choice, ToolCallScanner())
            logprobs = self._logprobs(piece.delta) if self._body.logprobs else None
            parts: list[Part] = [Content(piece.delta.text)] if piece.delta.text else []
            if self._body.calls_tools:
                parts = scanner.push(piece.delta.text)
                parts += scanner.finish() if piece.delta.finish_reason else []
            if piece.delta.finish_reason is not None:
                await self._remember(piece)
            if first or parts or logprobs is not None or piece.delta.finish_reason is not None:
                reason = self._reason(piece.delta, scanner)
                yield ChunkChoice(
                    index=piece.choice, delta=_message(parts, first), logprobs=logprobs, finish_reason=reason
                )

    def _reason(self, delta: Delta, scanner: ToolCallScanner) -> Any:
        called = scanner.calls and not scanner.amid  # A stop string may cut a call off.
        return "tool_calls" if delta.finish_reason == "stop" and called else delta.finish_reason

    async def _remember(self, piece: Piece) -> None:
        """Keep the conversation's tokens for its next turn."""
        request = self.answers.request(piece.prompt, piece.choice)
        ended = request.output and request.output[-1] in self._service.tokenizer.eos_token_ids
        answer = request.output[:-1] if ended else request.output
        prompt, conversations = self._prompt, self._service.conversations

        def remember(tokenizer: Tokenizer) -> None:
            # With a stop string, if there is one: the next message begins with it where it is a template's.
            text = prompt.text + tokenizer.decode(answer, skip_special_tokens=False)
            conversations.remember(text, (*prompt.token_ids, *answer))

        with suppress(EngineStoppedError):
            await self._service.engine.with_tokenizer(remember)

    def _logprobs(self, delta: Delta) -> ChoiceLogprobs:
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        return ChoiceLogprobs(content=[self._chosen(token_id, report) for token_id, report in rows])

    def _chosen(self, token_id: int, report: TokenLogprobs) -> ChosenLogprob:
        top = [TokenLogprob(**self._token(own), logprob=logprob) for own, logprob in report.top]
        return ChosenLogprob(**self._token(token_id), logprob=report.logprob, top_logprobs=top)

    def _token(self, token_id: int) -> dict[str, Any]:
        spelled = self._service.tokenizer.token_bytes(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "bytes": list(spelled)}


def _message(parts: list[Part], first: bool) -> Message:
    fields: dict[str, Any] = {"role": "assistant"} if first else {}
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case CallStart(index, name):
                function = Function(name=name, arguments="")
                calls.append(
                    ToolCall(index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)
                )
            case Arguments(index, text):
                if calls and calls[-1].index == index:
                    calls[-1].function.arguments += text
                else:
                    calls.append(ToolCall(index=index, function=Function(arguments=text)))
    if calls:
        fields["tool_calls"] = calls
    elif first:
        fields.setdefault("content", "")
    return Message(**fields)


def _join(choice: Choice, piece: ChunkChoice) -> None:
    message, delta = choice.message, piece.delta
    if delta.content:
        message.content = (message.content or "") + delta.content
    for call in delta.tool_calls or []:
        if call.id is not None:
            message.tool_calls = [*(message.tool_calls or []), call]
        elif message.tool_calls:
            message.tool_calls[-1].function.arguments += call.function.arguments
    if piece.logprobs is not None:
        known = [] if choice.logprobs is None else choice.logprobs.content
        choice.logprobs = ChoiceLogprobs(content=[*known, *piece.logprobs.content])
    choice.finish_reason = piece.finish_reason
    if choice.finish_reason is not None and message.content is None and not message.tool_calls:
        message.content = ""
