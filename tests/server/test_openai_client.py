"""The official client: answers are the engine's own, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tests.server.serving import Live

from subten import __version__
from subten.engine import SamplingParams
from subten.engine.sampling import choice_seed

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
RENDERED = "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nSay something.<|end|>\n<|begin|>assistant\n"


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_models_health_and_version(server: Live) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.object) == (server.name, "model")
    assert client.models.retrieve(model.id) == model
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": __version__}


def test_a_chat_is_what_the_engine_answers(server: Live) -> None:
    answer = server.client().chat.completions.create(
        model=server.name, messages=MESSAGES, temperature=0, max_tokens=30
    )
    token_ids = server.llm.tokenizer.encode(RENDERED)
    # The engine's thread owns the model; a second one would not be the same to the bit, a second request is.
    again = server.client().completions.create(model=server.name, prompt=token_ids, temperature=0, max_tokens=30)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == again.choices[0].text
    assert answer.choices[0].finish_reason == again.choices[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_joined_is_the_whole_answer(server: Live, seed: int) -> None:
    """The random model writes bytes that are often no UTF-8 at all, or parts of characters."""
    asked: dict[str, Any] = {
        **{"model": server.name, "messages": MESSAGES, "seed": seed, "max_tokens": 60, "temperature": 1.5, "n": 2},
        **{"stop": ["ab", "\u00e9"], "logprobs": True, "top_logprobs": 3},
    }
    whole = server.client().chat.completions.create(**asked)
    with server.client().chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert text_of(chunks, choice.index) == choice.message.content
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        logprobs = [own for piece in pieces for own in (piece.logprobs.content or [] if piece.logprobs else [])]
        assert [own.bytes for own in logprobs] == [own.bytes for own in choice.logprobs.content or []]
        assert all(len(own.top_logprobs) == 3 for own in logprobs)
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_n_answers_have_seeds_of_their_own(server: Live) -> None:
    asked: dict[str, Any] = {"model": server.name, "prompt": "three", "max_tokens": 20}
    several = server.client().completions.create(**asked, seed=5, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for index, choice in enumerate(several.choices):
        alone = server.client().completions.create(**asked, seed=choice_seed(5, index))
        assert choice.text == alone.choices[0].text
    assert len({choice.text for choice in several.choices}) == 3
    assert several.usage is not None
    assert several.usage.prompt_tokens == 5


def test_several_prompts_in_one_request(server: Live) -> None:
    asked: dict[str, Any] = {"model": server.name, "temperature": 0, "max_tokens": 12}
    prompts = ["one", "another", "a third one"]
    together = server.client().completions.create(**asked, prompt=prompts, n=2)
    with server.client().completions.create(**asked, prompt=prompts, n=2, stream=True) as stream:
        chunks = list(stream)
    for index, choice in enumerate(together.choices):
        alone = server.client().completions.create(**asked, prompt=prompts[index // 2])
        assert choice.index == index
        assert choice.text == alone.choices[0].text
        assert choice.text == "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def test_echo_and_logprobs(server: Live) -> None:
    prompt = "echo me"
    asked: dict[str, Any] = {"model": server.name, "prompt": prompt, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = server.client().completions.create(**asked, max_tokens=5).choices
    (alone,) = server.client().completions.create(**{**asked, "max_tokens": 5, "echo": False}).choices
    (scored,) = server.client().completions.create(**asked, max_tokens=0).choices
    assert choice.text == prompt + alone.text
    assert scored.text == prompt
    assert choice.logprobs is not None
    assert scored.logprobs is not None
    assert scored.logprobs.tokens == list(prompt)
    assert scored.logprobs.text_offset == list(range(7))
    assert scored.logprobs.token_logprobs == (choice.logprobs.token_logprobs or [])[:7]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == 12
    assert choice.logprobs.top_logprobs is not None
    # Greedy: the token of the answer is the most probable one, and both tops are reported.
    for token, logprob, top in list(
        zip(choice.logprobs.tokens or [], choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
    )[7:]:
        assert len(top) == 2
        assert max(top, key=lambda own: top[own]) == token
        assert top[token] == logprob


@pytest.mark.parametrize("prompt", ["é日本😀 x", [195, 97, 256, 98, 104]])
def test_offsets_are_places_in_the_text(server: Live, prompt: Any) -> None:
    """With characters of several tokens, in prompt and answer, tokens that are no text, and bytes that are no
    character."""
    begin = server.llm.tokenizer.backend.convert_tokens_to_ids("<|begin|>")
    asked: dict[str, Any] = {"model": server.name, "prompt": prompt, "logprobs": 0, "max_tokens": 60, "seed": 5}
    more: dict[str, Any] = {"logit_bias": {str(begin): 4}, "extra_body": {"ignore_eos": True}}
    (choice,) = server.client().completions.create(**asked, **more, echo=True).choices
    assert choice.logprobs is not None
    rows = list(zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True))
    silent = [place for place, (token, _) in enumerate(rows) if token == "<|begin|>" and place >= len(rows) - 60]
    parts = [offset for token, offset in rows if token.startswith("bytes:")]
    assert silent
    assert parts
    for place, (token, offset) in enumerate(rows):
        if place not in silent and not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token
    assert all(choice.text[offset] > "\x7f" for offset in parts)
    (alone,) = server.client().completions.create(**asked, **more).choices
    assert alone.logprobs is not None
    begun = rows[-60][1]
    assert alone.logprobs.text_offset == [offset - begun for _, offset in rows[-60:]]


def test_null_is_a_field_that_is_not_given(server: Live) -> None:
    asked: dict[str, Any] = {"model": server.name, "prompt": "abc", "max_tokens": 3, "seed": 1}
    null: dict[str, Any] = dict.fromkeys(("n", "echo", "stop", "logprobs", "stream", "stream_options"))
    plain = server.client().completions.create(**asked)
    assert server.client().completions.create(**asked, **null).choices == plain.choices
    more = {"min_tokens": None, "ignore_eos": None, "top_k": None}
    assert server.client().completions.create(**asked, extra_body=more).choices == plain.choices


def test_a_prompt_alone_has_no_answer(server: Live) -> None:
    answer = server.client().completions.create(model=server.name, prompt="abc", max_tokens=0, echo=True)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert answer.choices[0].finish_reason == "length"


def test_bias_stop_and_penalties_reach_the_engine(server: Live) -> None:
    client, z = server.client(), server.llm.tokenizer.encode("z")[0]
    asked: dict[str, Any] = {"model": server.name, "prompt": "abc", "max_tokens": 8, "temperature": 0}
    biased = client.completions.create(**asked, logit_bias={str(z): 100})
    assert biased.choices[0].text == "zzzzzzzz"
    stopped = client.completions.create(**asked, logit_bias={str(z): 100}, stop="zz")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 2
    plain = client.completions.create(**{**asked, "max_tokens": 60, "extra_body": {"ignore_eos": True}})
    spread = client.completions.create(
        **{**asked, "max_tokens": 60, "extra_body": {"ignore_eos": True}}, frequency_penalty=2, presence_penalty=2
    )
    assert len(set(spread.choices[0].text)) > len(set(plain.choices[0].text))


def test_default_lengths(server: Live) -> None:
    forever = {"ignore_eos": True}
    completion = server.client().completions.create(model=server.name, prompt="abc", extra_body=forever)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    long = "x" * 560
    chat = server.client().chat.completions.create(
        model=server.name, messages=[{"role": "user", "content": long}], extra_body=forever
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens == server.llm.max_context
    assert chat.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "there is no model 'nothing'"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError, "600 in all"),
        ({"max_tokens": 599}, openai.BadRequestError, "599 are asked for.*600 in all"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"abc": 1}}, openai.BadRequestError, "logit_bias has the key 'abc'"),
        ({"logit_bias": {"4000": 1}}, openai.BadRequestError, "token id 4000"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "nobody", "content": ""}]}, openai.BadRequestError, "messages.0.role"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "without stream"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]},
            openai.BadRequestError,
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"stop": ["x"] * 17}, openai.BadRequestError, "at most 16 items"),
        ({"stop": ["x", 1]}, openai.BadRequestError, "stop.1: Input should be a valid string"),
        ({"tool_choice": {"type": "function"}}, openai.BadRequestError, "tool_choice.function: Field required"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}},
            openai.BadRequestError,
            "min_tokens is 3; it must be 0 where a form",
        ),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs is given without logprobs"),
    ],
)
def test_errors_have_the_right_codes(server: Live, changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        server.client().chat.completions.create(
            **{"model": server.name, "messages": MESSAGES, "max_tokens": 5, **changes}
        )
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}', b"[" * 5000, b'{"model": "\\ud800", "prompt": "a"}']
)
def test_bodies_that_are_nonsense(server: Live, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for headers in ({"content-type": "application/json"}, {}):
            answer = server.post(path, content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_no_such_path_or_method(server: Live) -> None:
    assert server.post("/v1/nothing", json={}).status_code == 404
    answer = server.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "Method Not Allowed"


def test_an_answer_is_that_of_the_engine_alone(server: Live) -> None:
    """The served model answers as an `LLM` of its own does."""
    from tests.server.conftest import TINY

    from subten.engine import LLM

    alone = LLM(server.llm.model, **TINY, prefill="window")
    (expected,) = alone.generate("Once upon a time", SamplingParams(temperature=1, seed=3, max_tokens=40))
    (choice,) = (
        server.client()
        .completions.create(model=server.name, prompt="Once upon a time", temperature=1, seed=3, max_tokens=40)
        .choices
    )
    assert choice.text == expected.text
