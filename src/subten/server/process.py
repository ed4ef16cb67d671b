"""A process that serves until it is told to stop, and then stops cleanly."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from subten.engine import LLM
from subten.errors import ParameterError
from subten.server.app import create_app
from subten.server.service import Service
from subten.server.settings import ServerSettings

log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that they do not use (httpx: 5 s): who closes it first must be the client, or
its next request meets a connection that is being closed."""
_LAST_SECONDS = 2
"""For connections to end once all answers have."""


@contextmanager
def listen(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """Sockets at all addresses of the host, until the end of the block. Before a model is loaded, as that may take
    minutes; who connects before `run` is refused.

    Raises:
        ParameterError: the host is no address of this machine, or the port is taken or not allowed.
    """
    host, port = settings.host, settings.port
    try:
        found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    except (OSError, UnicodeError) as error:
        raise ParameterError(
            f"the host is '{host}', which has no address ({error}); give one of this machine, such as 127.0.0.1"
        ) from error
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, kind, protocol, _, address in found:
            try:
                bound = stack.enter_context(socket.socket(family, kind, protocol))
                if os.name == "posix":
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind((address[0], port, *address[2:]))
            except OSError as error:
                # A name such as localhost has addresses of a family that this machine may do without.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _refused(settings, error) from error
                absent = error
            else:
                port = bound.getsockname()[1]
                sockets.append(bound)
        if absent is not None and not sockets:
            raise _refused(settings, absent) from absent
        yield sockets


def _refused(settings: ServerSettings, error: OSError) -> ParameterError:
    return ParameterError(
        f"nothing can listen at port {settings.port} of {settings.host}: {error.strerror or error}; "
        "choose another port, or 0 for a free one, and an address of this machine"
    )


def run(llm: LLM, settings: ServerSettings, sockets: list[socket.socket], keys: Sequence[str]) -> None:
    """Serve at the sockets of `listen`, for who has one of the keys of `read_keys`, until SIGTERM or SIGINT.

    The first signal begins a drain: requests are refused with 503, `/health` too, and answers that are under way have
    `drain_seconds` to end by themselves. Those that are left, or all at a second signal, end with an error. Then the
    process ends.

    Raises:
        ParameterError: another server has come to listen at the port.
    """
    app = create_app(llm, settings, keys)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    _Server(config, app.state.service, settings).run(sockets)


class _Server(uvicorn.Server):
    """A server that drains before it exits."""

    def __init__(self, config: uvicorn.Config, service: Service, settings: ServerSettings) -> None:
        super().__init__(config)
        self._service = service
        self._settings = settings
        self._signals = 0
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and log where."""
        try:
            for bound in sockets or ():
                bound.listen(self.config.backlog)  # uvloop would say nothing of a port that is taken.
        except OSError as error:
            await self._service.close()
            raise _refused(self._settings, error) from error
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            raise _refused(self._settings, error) from error
        if sockets:
            self._log_started_message(sockets)

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Take a signal; `on_tick` acts on it."""
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to exit."""
        if self._signals and self._stopping is None:
            self._stopping = asyncio.create_task(self._service.drain())
        if self._signals > 1:
            await self._service.close()
        if self._stopping is not None and self._stopping.done():
            self.should_exit = True
        return await super().on_tick(counter)
