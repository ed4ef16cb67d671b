"""Answers on the wire: as server-sent events, or whole; and what happens when the reader goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from subten.errors import SubtenError
from subten.server.answers import Answers
from subten.server.api_errors import ApiError, from_subten

log = logging.getLogger(__name__)

T = TypeVar("T")
Whole_co = TypeVar("Whole_co", covariant=True)

CLIENT_CLOSED = 499
DONE = "[DONE]"


class Writer(Protocol[Whole_co]):
    """Puts answers into the form of an endpoint."""

    @property
    def answers(self) -> Answers:
        """The answers, under way."""

    def chunks(self) -> AsyncIterator[BaseModel]:
        """As they come."""

    async def whole(self) -> Whole_co:
        """All of them, when they have ended."""


async def respond(
    request: Request, beginning: Awaitable[Writer[T]], *, stream: bool, send_timeout: float
) -> Response | T:
    """Begin to answer, and give the answers as server-sent events or whole.

    Args:
        request: what is answered.
        beginning: begins.
        stream: as events.
        send_timeout: seconds that the client may leave an event unread.

    Raises:
        ApiError: they can't be given, or the client has gone.
    """
    try:
        writer = await beginning
    except SubtenError as error:
        raise from_subten(error) from error
    if stream:
        return EventStream(writer.answers, writer.chunks(), send_timeout)
    async with writer.answers:
        return await while_connected(request, writer.whole())


class EventStream(EventSourceResponse):
    """A stream of chunks. At its end, however it comes, the answers are closed.

    An error after the first chunk can't change the status any more: it is sent as an event, `{"error": {...}}`, which
    the clients of the OpenAI API raise. A client that does not read would keep its places for ever: it has so many
    seconds for each event.
    """

    def __init__(self, answers: Answers, chunks: AsyncIterator[BaseModel], send_timeout: float) -> None:
        super().__init__(_events(chunks), sep="\n", headers={"Cache-Control": "no-cache"}, send_timeout=send_timeout)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        async with self._answers:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.info("a stream was not read", extra={"id": self._answers.id})


async def _events(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[ServerSentEvent]:
    try:
        async for chunk in chunks:
            yield _event(chunk.model_dump_json(exclude_unset=True))
    except SubtenError as error:
        yield _event(json.dumps(from_subten(error).body()))
    except ApiError as error:
        yield _event(json.dumps(error.body()))
    else:
        yield _event(DONE)


def _event(data: str) -> ServerSentEvent:
    return ServerSentEvent(data, sep="\n")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client goes away.

    Raises:
        ApiError: the client has gone; nobody will read it.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "the client has closed the connection")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
