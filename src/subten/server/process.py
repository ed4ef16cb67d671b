"""A process that serves until it is told to stop, and then stops cleanly."""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

import uvicorn

from subten.engine import LLM
from subten.server.app import create_app
from subten.server.service import Service
from subten.server.settings import ServerSettings

log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that they do not use (httpx: 5 s): who closes it first must be the client, or
its next request meets a connection that is being closed."""
_LAST_SECONDS = 2
"""For connections to end once all answers have."""


def run(llm: LLM, settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    The first signal begins a drain: requests are refused with 503, `/health` too, and answers that are under way have
    `drain_seconds` to end by themselves. Those that are left, or all at a second signal, end with an error. Then the
    process ends.

    Raises:
        SubtenError: the key file can't be used.
    """
    app = create_app(llm, settings)
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
    _Server(config, app.state.service).run()


class _Server(uvicorn.Server):
    """A server that drains before it exits."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._signals = 0
        self._stopping: asyncio.Task[None] | None = None

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
