"""SIGTERM: streams end by themselves or with a clean error, and the process is gone in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from tests.server.serving import WAIT

SERVE = Path(__file__).parent / "slow_serve.py"
OPTIONS = ["--port", "0", "--kv", "kv2-plain", "--max-context", "1000", "--max-batch", "4", "--max-queue", "8"]


@contextmanager
def process(folder: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`subten serve`, slowly, and its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUBTEN_SERVE_SERVED_MODEL_NAME": "m"}
    command = [sys.executable, str(SERVE), str(folder), *OPTIONS, *options]
    with log.open("wb") as lines, subprocess.Popen(command, stderr=lines, env=environment) as server:
        try:
            deadline = time.monotonic() + 2 * WAIT
            while not (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield server, found[1]
        finally:
            with suppress(ProcessLookupError):
                server.kill()


def client_of(url: str) -> openai.OpenAI:
    """For all readers of a server: the test takes a third of the time that it takes with one for each."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, client: openai.OpenAI, max_tokens: int) -> None:
        super().__init__()
        self.client = client
        self.max_tokens = max_tokens
        self.chunks: list = []
        self.error: Exception | None = None
        self.begun = threading.Event()

    def run(self) -> None:
        try:
            stream = self.client.completions.create(
                model="m",
                prompt="abc",
                max_tokens=self.max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                self.chunks.append(chunk)
                self.begun.set()
        except openai.APIError as error:
            self.error = error


def until_it_drains(client: httpx.Client, log: Path) -> httpx.Response:
    """Its health, as soon as it has dealt with a signal."""
    deadline = time.monotonic() + WAIT
    while '"draining"' not in log.read_text():
        assert time.monotonic() < deadline, "the signal is not noticed"
        time.sleep(0.02)
    return client.get("/health")


def test_short_answers_end_in_a_drain_and_a_second_signal_ends_long_ones(tiny_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        process(tiny_folder, log, "--drain-seconds", "600") as (server, url),
        httpx.Client(base_url=url, timeout=WAIT) as plain,
    ):
        client = client_of(url)
        long, short = [Reader(client, 990) for _ in range(7)], Reader(client, 40)
        for reader in [*long[:3], short]:  # As many as fit into a batch.
            reader.start()
            assert reader.begun.wait(WAIT)
        for reader in long[3:]:
            reader.start()
        deadline = time.monotonic() + WAIT
        # Three, where the short one has ended before the others came.
        while not re.search(r"^vllm:num_requests_waiting\S* [34]\.0$", plain.get("/metrics").text, re.MULTILINE):
            assert time.monotonic() < deadline, "not all of them wait"
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        refused = until_it_drains(plain, log)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        refused = plain.post("/v1/completions", json={"model": "m", "prompt": "abc"})
        assert refused.json()["error"]["code"] == "engine_stopped"
        short.join(WAIT)
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        for reader in long:
            reader.join(WAIT)
        assert server.wait(WAIT) == 0
    assert short.error is None
    assert len(short.chunks) == 40
    # None ends in silence.
    assert all("shutting down" in str(reader.error) for reader in long)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["level"] for line in lines} <= {"info", "warning"}
    assert [line["answers"] >= 3 for line in lines if line["message"] == "draining"] == [True]
    assert len([line for line in lines if line["message"] == "answered"]) == 8


def test_the_end_of_a_drain_ends_long_answers_with_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    with process(tiny_folder, tmp_path / "log", "--drain-seconds", "0.5") as (server, url):
        reader = Reader(client_of(url), 990)
        reader.start()
        assert reader.begun.wait(WAIT)
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT) == 0
        reader.join(WAIT)
        assert "shutting down" in str(reader.error)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from subten.server.settings import ServerSettings

    monkeypatch.setenv("SUBTEN_SERVE_PORT", "1234")
    assert ServerSettings().port == 1234
    assert ServerSettings(port=4321).port == 4321
    assert ServerSettings().host == "127.0.0.1"
