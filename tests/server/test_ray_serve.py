"""examples/ray_serve.py: two replicas, and each session at the one that has its pages."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    monkeypatch.syspath_prepend(str(ROOT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "SUBTEN_HOME": str(tmp_path / "home")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": environment},
    )
    try:
        from examples.ray_serve import application

        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.external
def test_sessions_stay_at_their_replica_and_find_their_pages(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    used = set()
    # Replicas have random names, by which sessions find theirs: a few may all find the same.
    for session in range(64):
        messages: list = [{"role": "user", "content": f"Session {session}: tell me something about the sea, please."}]
        replicas, cached = [], []
        for _ in range(2):
            raw = client.chat.completions.with_raw_response.create(
                model="demo-moe",
                messages=messages,
                max_tokens=20,
                seed=1,
                extra_headers={"x-session-id": f"session-{session}"},
            )
            answer = raw.parse()
            replicas.append(raw.headers["x-replica"])
            cached.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens))
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Go on."},
            ]
        assert len(set(replicas)) == 1
        assert cached[1][1] >= cached[0][0]
        used.add(replicas[0])
        if session >= 3 and len(used) == 2:
            break
    assert len(used) == 2
    with client.completions.create(model="demo-moe", prompt="abc", max_tokens=5, stream=True) as stream:
        assert len(list(stream)) == 5
    assert httpx.post(f"{url}/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
