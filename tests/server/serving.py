"""Support: a real server on the loopback interface, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from fastapi import FastAPI
from tests.support.stepping import Steps, few_steps

from subten.engine import LLM
from subten.server.app import create_app
from subten.server.service import Service
from subten.server.settings import ServerSettings

WAIT = 30.0
PATIENT = ServerSettings(schema_seconds=WAIT)
"""A busy machine is no reason to refuse a schema."""


@dataclass(frozen=True)
class Live:
    """A running server and the engine behind it."""

    url: str
    app: FastAPI
    llm: LLM

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def few_steps(self, count: int) -> AbstractContextManager[Steps]:
        """A block in which no answer gets further than so many steps of the engine, until the block lets it."""
        return few_steps(self.llm.loop, count)

    @property
    def name(self) -> str:
        return self.service.model_name

    def client(self, key: str = "none", **options) -> openai.OpenAI:
        """The official client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def request(self, method: str, path: str, **options) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=60, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options) -> httpx.Response:
        return self.request("POST", path, **options)

    def metrics(self) -> dict[str, float]:
        """Samples by name, without labels; those that differ in labels alone are added up."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    def assert_idle(self) -> None:
        """Soon nothing is left of what clients asked for: no answer, no page that is not a snapshot's."""
        deadline = time.monotonic() + WAIT
        while self.llm.loop.busy or self.service.capacity.taken:
            assert time.monotonic() < deadline, "an answer goes on for nobody"
            time.sleep(0.005)

        def look() -> None:
            stats = self.llm.stats()
            assert stats.available_pages == stats.pages
            self.llm.check_integrity()

        self.service.engine._ask(look).result(WAIT)  # In its thread, which may be about to free something.


@contextmanager
def serving(llm: LLM, settings: ServerSettings | None = None) -> Iterator[Live]:
    """Serve a model at a free port until the end of the block."""
    app = create_app(llm, settings or PATIENT)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + WAIT
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Live(f"http://127.0.0.1:{port}", app, llm)
    finally:
        server.should_exit = True
        thread.join()
