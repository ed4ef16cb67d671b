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

OPTIONS = ["--port", "0", "--kv", "kv2-plain", "--max-context", "1000", "--max-batch", "4", "--max-queue", "8"]


@contextmanager
def process(folder: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`subten serve` and its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUBTEN_SERVE_SERVED_MODEL_NAME": "m"}
    command = [sys.executable, "-m", "subten", "serve", str(folder), *OPTIONS, *options]
    with log.open("wb") as lines, subprocess.Popen(command, stderr=lines, env=environment) as server:
        try:
            deadline = time.monotonic() + 60
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


def test_a_drain_lets_short_answers_end_and_long_ones_end_with_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process(tiny_folder, log, "--drain-seconds", "2.5") as (server, url):
        client = client_of(url)
        long, short = [Reader(client, 990) for _ in range(7)], Reader(client, 40)
        for reader in [*long[:3], short, *long[3:]]:
            reader.start()
        for reader in [*long[:3], short]:
            assert reader.begun.wait(60)
        server.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        time.sleep(0.3)
        refused = httpx.get(f"{url}/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        refused = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "abc"})
        assert refused.json()["error"]["code"] == "engine_stopped"
        for reader in [*long, short]:
            reader.join(60)
        assert server.wait(60) == 0
        assert time.monotonic() - begun < 10
    assert short.error is None
    assert len(short.chunks) == 40
    # None ends in silence: it is whole, which the first may be on a busy machine, or says that it is not.
    cut_off = [reader for reader in long if reader.error is not None]
    assert cut_off
    assert all("shutting down" in str(reader.error) for reader in cut_off)
    assert all(reader.chunks[-1].choices[0].finish_reason == "length" for reader in long if reader not in cut_off)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["level"] for line in lines} <= {"info", "warning"}
    assert any(line["message"] == "draining" and line["answers"] >= 3 for line in lines)
    assert len([line for line in lines if line["message"] == "answered"]) == 8


def test_a_second_signal_ends_it_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    with process(tiny_folder, tmp_path / "log", "--drain-seconds", "30") as (server, url):
        reader = Reader(client_of(url), 990)
        reader.start()
        assert reader.begun.wait(60)
        begun = time.monotonic()
        server.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert time.monotonic() - begun < 5
        reader.join(60)
        assert "shutting down" in str(reader.error)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from subten.server.settings import ServerSettings

    monkeypatch.setenv("SUBTEN_SERVE_PORT", "1234")
    assert ServerSettings().port == 1234
    assert ServerSettings(port=4321).port == 4321
    assert ServerSettings().host == "127.0.0.1"
