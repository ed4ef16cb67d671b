"""JSON of a given form, and schemas that are bad: slow, large, wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from tests.server.conftest import TINY
from tests.server.serving import WAIT, Live, serving

from subten.engine import LLM, LoadedModel
from subten.server.settings import ServerSettings
from subten.server.structured import Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "Who?"}]


def form(schema: dict[str, Any], name: str = "form") -> Any:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_obeys_its_schema(server: Live, seed: int) -> None:
    """The model is random: without the grammar it would write anything but JSON."""
    asked: dict[str, Any] = {
        **{"model": server.name, "messages": MESSAGES, "seed": seed, "max_tokens": 300, "n": 2},
        **{"response_format": form(PERSON), "logprobs": True},
    }
    answer = server.client().chat.completions.create(**asked)
    with server.client().chat.completions.create(**asked, stream=True) as stream:
        chunks = list(stream)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
        pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(pieces) == choice.message.content


def test_any_object(demo_live: Live) -> None:
    answer = demo_live.client().chat.completions.create(
        model=demo_live.name, messages=MESSAGES, max_tokens=120, seed=3, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_the_demo_model_obeys_too(demo_live: Live) -> None:
    answer = demo_live.client().chat.completions.create(
        model=demo_live.name, messages=MESSAGES, max_tokens=200, seed=1, response_format=form(PERSON)
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)


@pytest.fixture(scope="module")
def narrow(tiny: LoadedModel) -> Iterator[Live]:
    """A server that gives schemas little room."""
    settings = ServerSettings(schema_seconds=WAIT, schema_bytes=20_000, grammar_bytes=2_000_000)
    with serving(LLM(tiny, **TINY), settings) as live:
        yield live
        live.assert_idle()


SLOW = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": "^(a|b|ab|ba){1,90}x{1,90}$"} for i in range(250)},
}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nonsense"}, "is not supported"),
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}, "takes 20000"),
        (SLOW, "takes more|compiles to"),
    ],
)
def test_bad_schemas_are_400_and_streams_go_on(narrow: Live, schema: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"model": narrow.name, "messages": MESSAGES, "max_tokens": 150}
    with narrow.client().chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            narrow.client().chat.completions.create(**asked, response_format=form(schema))
        assert caught.value.code == "invalid_schema"
        assert [c.finish_reason for chunk in stream for c in chunk.choices][-1] == "length"
    good = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    answer = narrow.client().chat.completions.create(**{**asked, "max_tokens": 60}, response_format=form(good))
    assert "a" in json.loads(answer.choices[0].message.content or "")


def hurry(live: Live, patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give a schema no more than so many seconds."""
    grammars = live.service.grammars
    patch.setattr(grammars, "_settings", grammars._settings.model_copy(update={"schema_seconds": seconds}))


def stop_compiling(live: Live) -> asyncio.subprocess.Process:
    """The process that compiles schemas, which stands still from now on."""
    deadline = time.monotonic() + WAIT
    while (probe := live.service.grammars._probe) is None or not probe.done():
        assert time.monotonic() < deadline, "nothing compiles schemas"
        time.sleep(0.005)
    probe.result().send_signal(signal.SIGSTOP)
    return probe.result()


def test_schemas_that_take_for_ever_hold_up_nobody_and_are_ended(
    narrow: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"model": narrow.name, "messages": MESSAGES, "max_tokens": 60}
    grammars = narrow.service.grammars

    def form_of(name: str) -> Any:
        return form({"type": "object", "properties": {name: {"type": "null"}}, "required": [name]})

    stopped = stop_compiling(narrow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(narrow.client().chat.completions.create, **asked, response_format=form_of("a"))
        while not grammars._one_at_a_time.locked():
            assert not waiting.done()
        with narrow.client().chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
            assert [c.finish_reason for chunk in stream for c in chunk.choices][-1] == "length"
        assert not waiting.done()
        stopped.send_signal(signal.SIGCONT)
        answer = waiting.result(WAIT)
    assert json.loads(answer.choices[0].message.content or "") == {"a": None}
    with monkeypatch.context() as patch:
        stop_compiling(narrow)
        hurry(narrow, patch, 0.3)
        with pytest.raises(openai.BadRequestError, match=r"takes more than 0\.3 s to compile") as caught:
            narrow.client().chat.completions.create(**asked, response_format=form_of("b"))
        assert caught.value.code == "invalid_schema"
    answer = narrow.client().chat.completions.create(**asked, response_format=form_of("c"))
    assert json.loads(answer.choices[0].message.content or "") == {"c": None}


def test_a_schema_that_no_token_can_spell_is_its_own_error(server: Live) -> None:
    """A tab may not stand in a string of JSON, so that the grammar leads nowhere."""
    asked: dict[str, Any] = {"model": server.name, "messages": MESSAGES, "max_tokens": 100}
    nowhere = form({"type": "array", "items": {"type": "string", "pattern": "^\t$"}, "minItems": 1})
    with server.client().chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        with pytest.raises(openai.BadRequestError, match="can't go on") as caught:
            server.client().chat.completions.create(**asked, response_format=nowhere)
        assert caught.value.code == "guard"
        with (
            pytest.raises(openai.APIError, match="can't go on"),
            server.client().chat.completions.create(**asked, response_format=nowhere, stream=True) as failing,
        ):
            list(failing)
        assert [c.finish_reason for chunk in stream for c in chunk.choices][-1] == "length"


def test_a_schema_that_takes_too_much_memory(tiny: LoadedModel) -> None:
    with serving(LLM(tiny, **TINY), ServerSettings(schema_seconds=60, grammar_bytes=1_000_000)) as live:
        for _ in range(2):  # The second finds a process that was started for it.
            with pytest.raises(openai.BadRequestError, match="takes more memory to compile"):
                live.client().chat.completions.create(
                    model=live.name, messages=MESSAGES, max_tokens=5, response_format=form(SLOW)
                )


def test_a_process_that_does_not_start_is_started_again(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = Grammars._start_probe, [OSError("no more processes")]

    async def started(self: Grammars) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(self)

    monkeypatch.setattr(Grammars, "_start_probe", started)
    with serving(LLM(tiny, **TINY)) as live:
        asked: dict[str, Any] = {"model": live.name, "messages": MESSAGES, "response_format": form(PERSON)}
        with pytest.raises(openai.InternalServerError):
            live.client().chat.completions.create(**asked, max_tokens=3)
        assert live.client().chat.completions.create(**asked, max_tokens=3).choices
        live.assert_idle()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The processes that try schemas, as they have started."""
    start, found = Grammars._start_probe, list[asyncio.subprocess.Process]()

    async def started(self: Grammars) -> asyncio.subprocess.Process:
        found.append(await start(self))
        return found[-1]

    monkeypatch.setattr(Grammars, "_start_probe", started)
    return found


def first_of(probes: list[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    deadline = time.monotonic() + 30
    while not probes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return probes[0]


def test_a_process_that_was_ended_while_idle_is_replaced(
    tiny: LoadedModel, probes: list[asyncio.subprocess.Process]
) -> None:
    with serving(LLM(tiny, **TINY)) as live:
        os.kill(first_of(probes).pid, signal.SIGKILL)
        asked: dict[str, Any] = {"model": live.name, "messages": MESSAGES, "response_format": form(PERSON)}
        assert live.client().chat.completions.create(**asked, max_tokens=3).choices
        assert len(probes) == 2
        live.assert_idle()


def test_a_process_that_is_ended_at_work_is_replaced(
    tiny: LoadedModel, probes: list[asyncio.subprocess.Process]
) -> None:
    with serving(LLM(tiny, **TINY), ServerSettings(schema_seconds=30)) as live:
        pid = first_of(probes).pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1, os.kill, (pid, signal.SIGKILL)).start()
        asked: dict[str, Any] = {"model": live.name, "messages": MESSAGES, "response_format": form(PERSON)}
        assert live.client().chat.completions.create(**asked, max_tokens=3).choices
        assert len(probes) == 2
        live.assert_idle()


def test_processes_that_are_ended_again_and_again_are_no_fault_of_the_schema(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, kills = Grammars._start_probe, [signal.SIGKILL, signal.SIGTERM]

    async def started(self: Grammars) -> asyncio.subprocess.Process:
        process = await start(self)
        if kills:
            process.send_signal(kills.pop())
        return process

    monkeypatch.setattr(Grammars, "_start_probe", started)
    with serving(LLM(tiny, **TINY)) as live:
        client = live.client()
        asked: dict[str, Any] = {"model": live.name, "messages": MESSAGES, "response_format": form(PERSON)}
        with pytest.raises(openai.InternalServerError, match="was ended twice by something else") as caught:
            client.chat.completions.create(**asked, max_tokens=3)
        assert (caught.value.status_code, caught.value.code) == (503, "schema_process")
        assert client.chat.completions.create(**asked, max_tokens=3).choices
        live.assert_idle()


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"allOf": [{"type": "string", "maxLength": 3}, {"enum": ["ab", "abcd"]}]}, "allOf"),
    ({"$ref": "http://example.com/schema.json"}, "http://example.com"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "minLength/maxLength"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "(?i)lookahead"),
]


@pytest.mark.parametrize(("schema", "words"), LEFT_OUT)
def test_a_schema_that_would_hold_in_part_only_is_refused(server: Live, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        server.client().chat.completions.create(
            model=server.name, messages=MESSAGES, max_tokens=5, response_format=form(schema)
        )
    assert caught.value.code == "invalid_schema"


def test_a_tool_whose_schema_holds_in_part_is_taken(server: Live) -> None:
    parameters = {"type": "object", "properties": {f"p{n}": schema for n, (schema, _) in enumerate(LEFT_OUT)}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked: dict[str, Any] = {"model": server.name, "messages": MESSAGES, "max_tokens": 5}
    assert server.client().chat.completions.create(**asked, tools=tools, tool_choice="required").choices


def test_a_schema_nested_deeply(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(server, monkeypatch, 2)
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    body = {"model": server.name, "messages": MESSAGES, "max_tokens": 1, "response_format": form(schema)}
    assert server.post("/v1/chat/completions", json=body).status_code in (200, 400)


def test_forms_that_are_refused(server: Live) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for changes, words in (
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "tools": [tool]}, "exclude each other"),
    ):
        body = {"model": server.name, "messages": MESSAGES, **changes}
        answer = server.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
