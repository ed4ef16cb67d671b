"""Load a server with many streams, cancel a third of them, mix in malformed bodies; then end it in the middle.

It starts `subten serve` in float64 at a free port of the loopback interface, asks each prompt once alone, and holds
every stream that was not cancelled against that. Prints one JSON object; exits with 1 where something is not as it
should be.

    python tools/load_server.py demo-moe --streams 64 --seconds 60 --output benchmarks/results/server_load_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

PROMPTS = 16
MALFORMED = (b"", b"{", b'{"model": 5}', b"[" * 3000, b"\xff\xfe", b'{"model": "m", "prompt": "a", "nonsense": 1}')
START_SECONDS = 120


@dataclass
class Result:
    """What happened. `problems` is empty where everything is as it should be."""

    model: str
    streams: int
    seconds: float
    machine: str = field(default_factory=platform.machine)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    finished: int = 0
    cancelled: int = 0
    malformed: int = 0
    refused: int = 0
    tokens: int = 0
    equal_to_single_run: int = 0
    server_errors: int = 0
    pages_in_use_at_end: float = 0.0
    rss_mib_after_a_quarter: float = 0.0
    rss_mib_at_end: float = 0.0
    inter_token_ms_p50: float = 0.0
    inter_token_ms_p99: float = 0.0
    first_token_ms_p50: float = 0.0
    exit_seconds: float = 0.0
    exit_code: int | None = None
    streams_at_the_signal: int = 0
    ended_with_an_error: int = 0
    ended_whole: int = 0
    ended_in_silence: int = 0
    refused_at_the_end: int = 0
    problems: list[str] = field(default_factory=list)


@contextmanager
def server(model: str, streams: int, max_context: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that serves, and its address."""
    options = ["--port", "0", "--max-batch", str(streams), "--max-queue", str(streams), "--prefill", "window"]
    options += ["--dtype", "float64", "--max-context", str(max_context), "--served-model-name", "m"]
    with (
        tempfile.NamedTemporaryFile("w+") as log,
        subprocess.Popen([sys.executable, "-m", "subten", "serve", model, *options], stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server has not started:\n{Path(log.name).read_text()}")
                time.sleep(0.05)
            yield process, found[1]
        finally:
            process.kill()


class Load:
    """The clients of one server.

    Args:
        url: its address.
        result: where what happens is written.
    """

    def __init__(self, url: str, result: Result) -> None:
        self.result = result
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self.expected: dict[int, str] = {}
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.open = 0

    def body(self, number: int) -> dict[str, Any]:
        """The request with a number: the same at every time."""
        rng = random.Random(number)
        words = ["the", "sea", "of", "numbers", "and", "light", "was", "an", "old", "house"]
        prompt = f"{number}: " + " ".join(rng.choice(words) for _ in range(rng.randrange(3, 60)))
        own = {
            "prompt": prompt,
            "seed": number,
            "temperature": rng.choice([0, 0.8]),
            "max_tokens": rng.randrange(4, 25),
        }
        return {"model": "m", "stream": True, "ignore_eos": True, **own}

    async def alone(self) -> None:
        """Ask everything once, one after the other."""
        for number in range(PROMPTS):
            text, ending = await self.read(self.body(number), None)
            if ending != "done":
                raise SystemExit(f"request {number} failed alone: {ending}")
            self.expected[number] = text

    async def read(self, body: dict[str, Any], leave_after: int | None) -> tuple[str, str]:
        """The text of a stream, and how it ended: done, left, error, refused or silence."""
        text, count, latest = "", 0, time.perf_counter()
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            self.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                await answer.aread()
                return text, "refused"
            self.open += 1
            try:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return text, "done"
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return text, "error"
                    now = time.perf_counter()
                    (self.gaps if count else self.firsts).append(now - latest)
                    latest, count = now, count + 1
                    text += chunk["choices"][0]["text"]
                    if count == leave_after:
                        return text, "left"
            finally:
                self.open -= 1
        return text, "silence"

    async def user(self, number: int, until: float) -> None:
        """One after the other: streams, a third of them left early, and now and then nonsense."""
        rng, result = random.Random(1000 + number), self.result
        while time.monotonic() < until:
            if rng.random() < 0.15:
                answer = await self.client.post("/v1/completions", content=rng.choice(MALFORMED))
                self.statuses[answer.status_code] += 1
                result.malformed += 1
                if answer.status_code != 400:
                    result.problems.append(f"a malformed body is answered with {answer.status_code}")
                continue
            which = rng.randrange(PROMPTS)
            leave = rng.randrange(1, 8) if rng.random() < 1 / 3 else None
            try:
                text, ending = await self.read(self.body(which), leave)
            except httpx.TransportError as error:
                text, ending = "", f"a broken connection: {error!r}"
            whole = self.expected[which]
            if ending == "left":
                result.cancelled += 1
                if not whole.startswith(text):
                    result.problems.append(f"a stream that was left differs from its single run: {which}")
            elif ending == "done":
                result.finished += 1
                result.equal_to_single_run += text == whole
            else:
                result.refused += 1
                result.problems.append(f"a stream ended with {ending}")

    async def figures(self) -> dict[str, float]:
        """The server's own."""
        text = (await self.client.get("/metrics")).text
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in samples}


def middle(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return round(1000 * sorted(values)[int(share * (len(values) - 1))], 2) if values else 0.0


async def load(url: str, process: subprocess.Popen[bytes], result: Result) -> None:
    """The whole of it."""
    clients = Load(url, result)
    await clients.alone()
    clients.gaps, clients.firsts = [], []
    before = (await clients.figures())["vllm:generation_tokens_total"]
    until = time.monotonic() + result.seconds
    users = asyncio.gather(*(clients.user(number, until) for number in range(result.streams)))
    await asyncio.sleep(result.seconds / 4)
    result.rss_mib_after_a_quarter = round((await clients.figures())["process_resident_memory_bytes"] / 2**20, 1)
    await users
    for _ in range(200):
        now = await clients.figures()
        if now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 0:
            break
        await asyncio.sleep(0.05)
    result.tokens = int(now["vllm:generation_tokens_total"] - before)
    result.pages_in_use_at_end = now["vllm:kv_cache_usage_perc"]
    result.rss_mib_at_end = round(now["process_resident_memory_bytes"] / 2**20, 1)
    result.inter_token_ms_p50, result.inter_token_ms_p99 = (middle(clients.gaps, share) for share in (0.5, 0.99))
    result.first_token_ms_p50 = middle(clients.firsts, 0.5)
    result.server_errors = sum(count for status, count in clients.statuses.items() if status >= 500)
    await end(clients, process)


async def end(clients: Load, process: subprocess.Popen[bytes]) -> None:
    """SIGTERM while everybody reads long answers."""
    result = clients.result
    bodies = [{**clients.body(number), "max_tokens": 150} for number in range(result.streams)]
    streams = [asyncio.create_task(clients.read(body, None)) for body in bodies]
    while clients.open < result.streams and not all(stream.done() for stream in streams):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    result.streams_at_the_signal = clients.open
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    endings = Counter(ending for _, ending in await asyncio.gather(*streams))
    result.exit_code = await asyncio.to_thread(process.wait, 60)
    result.exit_seconds = round(time.monotonic() - begun, 2)
    result.ended_whole, result.ended_with_an_error = endings["done"], endings["error"]
    result.ended_in_silence, result.refused_at_the_end = endings["silence"], endings["refused"]
    await clients.client.aclose()


def judge(result: Result) -> None:
    """Write down what is not as it should be."""
    checks = {
        "there were server errors": result.server_errors == 0,
        "a stream differs from its single run": result.equal_to_single_run == result.finished,
        "nothing was finished, or nothing cancelled, or nothing malformed": min(
            result.finished, result.cancelled, result.malformed
        )
        > 0,
        "pages have leaked": result.pages_in_use_at_end == 0,
        "memory has grown": result.rss_mib_at_end < 1.1 * result.rss_mib_after_a_quarter + 30,
        "the exit took 10 s or more": result.exit_seconds < 10,
        "the exit code is not 0": result.exit_code == 0,
        "a stream ended in silence": result.ended_in_silence == 0,
    }
    result.problems = sorted({*result.problems, *(problem for problem, fine in checks.items() if not fine)})


def main() -> int:
    """Run, print, and say with the exit code whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-context", type=int, default=400)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = Result(Path(options.model).name, options.streams, options.seconds)
    with server(options.model, options.streams, options.max_context) as (process, url):
        asyncio.run(load(url, process, result))
    judge(result)
    text = json.dumps(asdict(result), indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if result.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
