"""Answers on the wire: as server-sent events, or whole; and what happens when the reader goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from subten.errors import SubtenError
from subten.server.answers import Answers
from subten.server.api_errors import ApiError, from_subten

T = TypeVar("T")

CLIENT_CLOSED = 499
DONE = "[DONE]"


class EventStream(EventSourceResponse):
    """A stream of chunks. At its end, however it comes, the answers are closed.

    An error after the first chunk can't change the status any more: it is sent as an event, `{"error": {...}}`, which
    the clients of the OpenAI API raise.
    """

    def __init__(self, answers: Answers, chunks: AsyncIterator[BaseModel]) -> None:
        super().__init__(_events(chunks), sep="\n", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        async with self._answers:
            await super().__call__(scope, receive, send)


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
