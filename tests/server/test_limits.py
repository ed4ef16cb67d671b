"""Keys, sizes, places and time: what one client may take, and that the others notice nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message
from tests.server.conftest import TINY
from tests.server.serving import WAIT, Live, serving

from subten.engine import LLM, LoadedModel, load_model
from subten.errors import ParameterError, StorageError
from subten.server.api_errors import ApiError
from subten.server.keys import read_keys
from subten.server.limits import Capacity
from subten.server.logs import JsonLines
from subten.server.monitoring import Version
from subten.server.settings import ServerSettings
from subten.server.streams import EventStream

KEYS = ("first-key", "second-key")
ENDLESS = {"prompt": "abc", "max_tokens": 590, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys, two places and small bodies."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text("# who may ask\n" + "\n".join(KEYS) + "\n\n")
    settings = ServerSettings(
        **{"api_key_file": path, "max_queue": 1, "max_body_bytes": 2000},
        **{"served_model_name": "mine", "allowed_origins": ("http://here.example",)},
    )
    with serving(LLM(tiny, **{**TINY, "max_batch": 1}), settings) as live:
        yield live
        live.assert_idle()


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(strict: Live, key: str) -> None:
    assert strict.client(key).models.list().data[0].id == "mine"
    assert strict.client(key).completions.create(model="mine", prompt="abc", max_tokens=2).choices


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Bearer first-key2", "Basic first-key", "Bearer é"]
)
def test_no_key_and_wrong_keys(strict: Live, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/nothing")):
        answer = strict.request(method, path, headers=headers, content=b"x" * 4000)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        strict.client("wrong").models.list()


def test_monitors_need_no_key(strict: Live) -> None:
    for path in ("/health", "/version", "/metrics", "/"):
        assert strict.get(path).status_code == 200


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(StorageError, match="can't be read"):
        read_keys(path)
    path.write_text("# nothing\n")
    with pytest.raises(ParameterError, match="has no key"):
        read_keys(path)
    path.write_text("has space\n")
    with pytest.raises(ParameterError, match="plain ASCII"):
        read_keys(path)


def test_a_body_that_is_too_large(strict: Live) -> None:
    for told in (True, False):
        body = b"x" * 3000
        answer = strict.post(
            "/v1/completions",
            content=body if told else iter([body]),  # An iterator is sent in chunks, with no length beforehand.
            headers={"Authorization": "Bearer first-key"},
        )
        assert answer.status_code == 413
        assert "larger than 2000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_does_not_come(tiny: LoadedModel) -> None:
    with serving(LLM(tiny, **TINY), ServerSettings(body_timeout=0.2)) as hasty:
        host, port = hasty.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), WAIT) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode() + b"abc")
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_over_capacity_is_429_and_nobody_else_notices(strict: Live) -> None:
    client = strict.client(KEYS[0])
    asked = {"model": "mine", "prompt": "abc", "temperature": 0, "max_tokens": 150}
    with (
        strict.few_steps(40) as steps,
        client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as running,
    ):
        first = next(iter(running)).choices[0].text
        with client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
            with pytest.raises(openai.RateLimitError, match="takes 2") as caught:
                client.completions.create(**asked)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        steps.more(200)
        rest = "".join(chunk.choices[0].text for chunk in running)
    strict.assert_idle()
    again = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert again.choices[0].text == first + rest
    with pytest.raises(openai.BadRequestError, match="takes 2 at a time"):
        client.completions.create(**asked, n=3)


def test_cors_is_for_the_named_origins_and_off_by_default(strict: Live, server: Live) -> None:
    asked = {"Origin": "http://here.example", "Access-Control-Request-Method": "POST"}
    answer = strict.request("OPTIONS", "/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "http://here.example"
    asked["Origin"] = "http://elsewhere.example"
    assert "access-control-allow-origin" not in strict.request("OPTIONS", "/v1/completions", headers=asked).headers
    assert "access-control-allow-origin" not in server.get("/health", headers=asked).headers


def test_capacity_counts_and_closes() -> None:
    capacity = Capacity(3)
    place = capacity.enter(2)
    with pytest.raises(ApiError) as caught:
        capacity.enter(2)
    assert caught.value.status == 429
    place.leave()
    place.leave()
    assert capacity.taken == 0
    capacity.close(ApiError(503, "closed"))
    with pytest.raises(ApiError, match="closed"):
        capacity.enter(1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(server: Live, stream: bool) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(WAIT):
            body = {**ENDLESS, "model": server.name, "stream": stream}
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body, timeout=60))
            while server.llm.stats().running == 0:
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with server.few_steps(40):
        asyncio.run(leave())
        server.assert_idle()


def test_a_stream_closed_after_three_chunks_frees_its_pages(server: Live) -> None:
    with server.few_steps(40):
        with server.client().completions.create(
            model=server.name, prompt="x" * 200, max_tokens=390, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in range(3):
                next(iter(stream))
        server.assert_idle()


def test_a_stream_that_is_not_read_gives_its_places_back() -> None:
    """What lies between server and client takes some megabytes in; so here the last piece of it is played."""
    sent: list[str] = []

    class Answers:
        id = "unread"
        left = False

        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            self.left = True

    async def chunks() -> AsyncIterator[Version]:
        while True:
            yield Version(version="1")

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if len(sent) == 3:
            await asyncio.get_running_loop().create_future()

    answers: Any = Answers()
    stream = EventStream(answers, chunks(), 0.05)
    asyncio.run(asyncio.wait_for(stream({"type": "http", "method": "POST"}, receive, send), 30))
    assert answers.left
    assert sent == ["http.response.start", *["http.response.body"] * 2]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_far_too_long_holds_up_nobody(server: Live, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its beginning; tokenising all of it would take seconds, in which nobody else is answered."""
    encode, lengths = server.llm.tokenizer.encode, []

    def counted(text: str, *, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.llm.tokenizer, "encode", counted)
    text, few = "word " * 700_000, 16 * server.llm.max_context
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    answer = server.post(path, json={"model": server.name, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert re.search(r"more than \d{4} tokens, where the context of this server holds 600", error["message"])
    assert lengths == [few]


def test_a_long_text_of_few_tokens_is_not_refused_by_its_beginning(server: Live) -> None:
    class LongTokens:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * (len(text) // 20)

    tokenizer: Any = LongTokens()
    server.service.check_length(tokenizer, "x" * 11_000, "prompt")


def test_an_answer_that_fails_is_alone(tiny_folder: Path) -> None:
    """A token whose embedding is not a number breaks the requests that have it, and no other."""
    model = load_model(tiny_folder, dtype="float64")
    (poison,) = model.tokenizer.encode("!")
    model.decoder.weights.embedding[poison] = float("nan")
    with serving(LLM(model, **TINY)) as live:
        client = live.client()
        asked = {"model": live.name, "max_tokens": 30, "temperature": 0, "logit_bias": {str(poison): -100}}
        with client.completions.create(**asked, prompt="fine", stream=True) as stream:
            with pytest.raises(openai.InternalServerError, match="not finite"):
                client.completions.create(**asked, prompt="broken!")
            with (
                client.completions.create(**asked, prompt="broken!", stream=True) as broken,
                pytest.raises(openai.APIError, match="not finite"),
            ):
                list(broken)
            assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
        live.assert_idle()


def test_the_log_has_figures_and_no_text(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="subten"):
        server.client().completions.create(model=server.name, prompt="my secret prompt", max_tokens=3)
        with pytest.raises(openai.NotFoundError):
            server.client().completions.create(model="x", prompt="my secret prompt")
        server.assert_idle()
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    answered = next(line for line in lines if line["message"] == "answered")
    assert answered["prompt_tokens"] == 16
    assert {"id", "completion_tokens", "cached_tokens", "seconds", "first_token_seconds", "finish_reasons"} <= set(
        answered
    )
    assert any(line["message"] == "refused" and line["status"] == 404 for line in lines)
    assert "secret" not in json.dumps(lines)


def test_the_log_has_texts_where_that_is_asked(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(LLM(tiny, **TINY), ServerSettings(log_prompts=True)) as live,
        caplog.at_level(logging.INFO, logger="subten"),
    ):
        answer = live.client().completions.create(model=live.name, prompt="my own prompt", max_tokens=5, seed=1)
        live.assert_idle()
    record = next(record for record in caplog.records if record.getMessage() == "answered")
    assert record.__dict__["prompts"] == ["my own prompt"]
    assert record.__dict__["texts"] == [answer.choices[0].text]
