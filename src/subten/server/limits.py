"""What one client may take of the server: the size of a body, the time that it takes to arrive, and a place."""

from __future__ import annotations

import asyncio
import math
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from subten.server.api_errors import ApiError

_LONGEST_RETRY = 60
_FORGET = 0.2


class BodyLimit:
    """Middleware that takes a request's body in before anything else sees it, up to a size and for a time."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(Headers(scope=scope), receive), self._seconds)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="body_timeout")
            await _refuse(error, scope, receive, send)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None where the client has gone."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._most:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most} bytes; shorten it", code="body_too_large")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    # What is left of the body would be taken for the next request.
    headers = {**error.headers, "Connection": "close"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, and then what the connection says."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


class Capacity:
    """Places for answers. One that finds none is told when to come back.

    Args:
        places: answers that may be under way or waiting at a time.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self._closed: ApiError | None = None
        self._seconds = 1.0

    @property
    def open(self) -> bool:
        """Whether requests are taken at all."""
        return self._closed is None

    def close(self, error: ApiError) -> None:
        """Refuse everything from now on, with this error."""
        self._closed = error

    def enter(self, answers: int) -> Place:
        """Take places.

        Raises:
            ApiError: 400 where there are never so many, 429 where there are not now, or what `close` was told.
        """
        if self._closed is not None:
            raise self._closed
        if answers > self.places:
            raise ApiError(400, f"{answers} answers are asked for; this server takes {self.places} at a time")
        if self.taken + answers > self.places:
            seconds = min(_LONGEST_RETRY, max(1, math.ceil(self._seconds)))
            raise ApiError(
                429,
                f"the server has {self.taken} answers to give and takes {self.places}; come back in {seconds} s",
                kind="rate_limit_error",
                code="over_capacity",
                headers={"Retry-After": str(seconds)},
            )
        self.taken += answers
        return Place(self, answers)

    def leave(self, answers: int, seconds: float) -> None:
        """Give places back after so many seconds."""
        self.taken -= answers
        self._seconds += _FORGET * (seconds - self._seconds)


class Place:
    """Places that somebody has taken; to be left once, and a second time for nothing."""

    def __init__(self, capacity: Capacity, answers: int) -> None:
        self._capacity = capacity
        self._answers = answers
        self._since = time.monotonic()

    @property
    def left(self) -> bool:
        """Whether they have been given back."""
        return self._answers == 0

    def leave(self) -> None:
        """Give them back."""
        if self._answers:
            self._capacity.leave(self._answers, time.monotonic() - self._since)
            self._answers = 0
