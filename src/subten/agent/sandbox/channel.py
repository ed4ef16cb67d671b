"""The host's end of the stream to a guest agent. The guest is not trusted: what it sends is bounded and checked."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from subten.agent.sandbox.guest.agent import CHUNK, HEADER

Frame = tuple[bytes, bytes]
"""Kind and payload."""

_LARGEST = 1 << 20
_RECEIVE = 1 << 18


class LostError(Exception):
    """The guest is gone, does not answer, or does not keep to the protocol. The clone has no further use."""


class Channel:
    """Requests and answers over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def wait_ready(self, seconds: float) -> None:
        """Wait until the guest agent says that it is there.

        Raises:
            LostError: it did not in time.
        """
        try:
            kind, _ = self._receive(time.monotonic() + seconds)
        except TimeoutError:
            raise LostError(f"its guest did not answer within {seconds:g} s") from None
        if kind != b"r":
            raise LostError("its guest agent broke the protocol")

    def request(
        self,
        request: Mapping[str, Any],
        frames: Iterable[Frame],
        receive: Callable[[bytes, bytes], None] | None,
        soft: float | None,
        grace: float,
    ) -> dict[str, Any]:
        """Send a request with its input, pass on what comes, return the answer.

        Args:
            request: becomes the JSON of its first frame.
            frames: its input.
            receive: gets the frames before the answer; without it there must be none.
            soft: seconds after which the guest is told to end what runs; None: it works on its own.
            grace: seconds that the guest may then take, or, without `soft`, may be silent.

        Raises:
            LostError: see there.
        """
        self._send(itertools.chain([(b"q", json.dumps(request).encode())], frames), grace)
        told = soft is None
        deadline = time.monotonic() + (grace if soft is None else soft)
        while True:
            try:
                kind, payload = self._receive(deadline)
            except TimeoutError:
                if told:
                    raise LostError(f"its guest did not answer within {grace:g} s") from None
                self._send([(b"k", b"")], grace)
                told, deadline = True, time.monotonic() + grace
                continue
            if kind == b"r":
                return self._answer(payload)
            if receive is None:
                raise LostError("its guest agent broke the protocol")
            receive(kind, payload)
            if soft is None:
                deadline = time.monotonic() + grace

    def close(self) -> None:
        """Wake up whoever waits in `request` and close."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @staticmethod
    def _answer(payload: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(payload)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise LostError("its guest agent broke the protocol")
        return answer

    def _send(self, frames: Iterable[Frame], seconds: float) -> None:
        """Small frames go out together: each piece that arrives wakes the guest up."""
        waiting = bytearray()
        for kind, payload in frames:
            waiting += HEADER.pack(kind, len(payload)) + payload
            if len(waiting) >= CHUNK:
                self._push(waiting, seconds)
                waiting.clear()
        self._push(waiting, seconds)

    def _push(self, content: bytes | bytearray, seconds: float) -> None:
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(content)
        except TimeoutError:
            raise LostError(f"its guest did not read for {seconds:g} s") from None
        except OSError as error:
            raise LostError("it is gone") from error

    def _receive(self, deadline: float) -> Frame:
        """The next frame; TimeoutError keeps what has come of it."""
        self._fill(HEADER.size, deadline)
        kind, length = HEADER.unpack_from(self._buffer)
        if length > _LARGEST:
            raise LostError("its guest agent broke the protocol")
        self._fill(HEADER.size + length, deadline)
        payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        return kind, payload

    def _fill(self, size: int, deadline: float) -> None:
        while len(self._buffer) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._connection.settimeout(left)
                part = self._connection.recv(_RECEIVE)
            except TimeoutError:
                raise
            except OSError as error:
                raise LostError("it is gone") from error
            if not part:
                raise LostError("it is gone")
            self._buffer += part


assert CHUNK <= _LARGEST
