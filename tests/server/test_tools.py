"""Tool calls: the scanner however the text is cut, and live answers of a model that is held to the tools' schemas."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.serving import Live

from subten.server.tools import CLOSE, Arguments, CallStart, Content, Part, ToolCallScanner

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "What will the weather be?"}]


def scan(pieces: list[str]) -> list[Part]:
    scanner = ToolCallScanner()
    return [part for piece in pieces for part in scanner.push(piece)] + scanner.finish()


def joined(parts: list[Part]) -> tuple[str, list[list[str]]]:
    """The text, and the calls as name and arguments."""
    text, calls = "", []
    for part in parts:
        match part:
            case Content(piece):
                text += piece
            case CallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case Arguments(index, piece):
                assert index == len(calls) - 1
                calls[index][1] += piece
    return text, calls


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(bounds)]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"}', "\\", "</tool_call>", "😀", "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
    ),
    max_size=3,
)


@given(
    before=st.text(max_size=12).filter(lambda text: "<tool_call>" not in text),
    calls=CALLS,
    ascii_only=st.booleans(),
    places=st.lists(st.integers(0, 1000), max_size=40),
)
def test_calls_are_found_wherever_the_text_is_cut(
    before: str, calls: list[tuple[str, dict]], ascii_only: bool, places: list[int]
) -> None:
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(own, ensure_ascii=ascii_only)}}}\n</tool_call>'
        for name, own in calls
    ]
    text, found = joined(scan(cut(before + "\n".join(written), places)))
    assert text == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(
    text=st.text(alphabet='<tool_cal>/{}":, \nn\\ame\x01\targuments', max_size=120),
    places=st.lists(st.integers(0, 200)),
)
def test_any_text_is_the_same_however_it_is_cut(text: str, places: list[int]) -> None:
    assert joined(scan(cut(text, places))) == joined(scan([text]))


@given(text=st.text(max_size=60), places=st.lists(st.integers(0, 100)))
def test_text_without_calls_is_untouched(text: str, places: list[int]) -> None:
    assert joined(scan(cut(text, places))) == (text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hi <tool_c", ("hi <tool_c", [])),
        ('<tool_call>\n{"name": "f"', ('<tool_call>\n{"name": "f"', [])),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', ("", [["f", '{"a": 1']])),
        ('<tool_call>{"name":"f","arguments":{"a":"\t"}}</tool_call>bye', ("bye", [["f", '{"a":"\\t"}']])),
    ],
)
def test_calls_that_are_cut_off(text: str, expected: tuple) -> None:
    assert joined(scan(list(text))) == expected


def check(name: str, arguments: str) -> None:
    schema = WEATHER if name == "weather" else {"type": "object", "maxProperties": 0}
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_obeys_its_schema_whole_and_streamed(server: Live, seed: int, choice: Any) -> None:
    asked: dict[str, Any] = {
        **{"model": server.name, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice},
        **{"seed": seed, "max_tokens": 250, "parallel_tool_calls": False},
    }
    (whole,) = server.client().chat.completions.create(**asked).choices
    with server.client().chat.completions.create(**asked, stream=True) as stream:
        pieces = [choice for chunk in stream for choice in chunk.choices]
    assert whole.finish_reason == pieces[-1].finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert whole.message.content is None
    check(call.function.name, call.function.arguments)
    if choice != "required":
        assert call.function.name == "weather"
    deltas = [own for piece in pieces for own in piece.delta.tool_calls or []]
    assert deltas[0].id
    assert deltas[0].function is not None
    assert deltas[0].function.name == call.function.name
    assert all(own.id is None for own in deltas[1:])
    assert "".join(own.function.arguments or "" for own in deltas if own.function) == call.function.arguments
    assert len(deltas) > 2 or call.function.name == "now"


def test_the_official_client_assembles_streamed_calls(demo_live: Live) -> None:
    with demo_live.client().chat.completions.stream(
        model=demo_live.name,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        seed=2,
        max_tokens=300,
        parallel_tool_calls=False,
    ) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls or []
    check(call.function.name, call.function.arguments)


def test_auto_may_answer_in_text_and_none_hides_the_tools(demo_live: Live) -> None:
    asked: dict[str, Any] = {"model": demo_live.name, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    plain = demo_live.client().chat.completions.create(**asked)
    none = demo_live.client().chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    auto = demo_live.client().chat.completions.create(**asked, tools=TOOLS)
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage is not None
    assert auto.usage is not None
    assert auto.usage.prompt_tokens > none.usage.prompt_tokens
    assert auto.choices[0].message.content or auto.choices[0].message.tool_calls


def test_a_conversation_with_calls_goes_on(demo_live: Live) -> None:
    client = demo_live.client()
    asked: dict[str, Any] = {"model": demo_live.name, "tools": TOOLS, "max_tokens": 200, "seed": 4}
    first = client.chat.completions.create(
        **asked, messages=MESSAGES, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = first.choices[0].message.tool_calls or []
    messages = [
        *MESSAGES,
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    second = client.chat.completions.create(**{**asked, "max_tokens": 8}, messages=messages)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize(("stop", "reason"), [('"city"', "stop"), (CLOSE, "tool_calls")])
def test_a_call_that_a_stop_string_cuts_off_is_none_to_be_made(server: Live, stop: str, reason: str) -> None:
    answer = server.client().chat.completions.create(
        **{"model": server.name, "messages": MESSAGES, "max_tokens": 300, "seed": 1, "stop": stop},
        **{"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == reason
    assert choice.message.tool_calls is not None
    assert (reason == "stop") == choice.message.tool_calls[-1].function.arguments.rstrip().endswith("{")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("[" * 900 + "]" * 900, "recursion"), ('{"a": "\\ud800"}', "not valid Unicode")],
)
def test_arguments_of_an_earlier_call_that_no_template_can_write(demo_live: Live, arguments: str, words: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: Any = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match=words):
        demo_live.client().chat.completions.create(model=demo_live.name, messages=messages, max_tokens=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not in tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "no object"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"type": "x"}}},
                        },
                    }
                ]
            },
            "is not supported",
        ),
    ],
)
def test_bad_tools(server: Live, changes: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        server.client().chat.completions.create(model=server.name, messages=MESSAGES, max_tokens=5, **changes)
