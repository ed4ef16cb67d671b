"""A conversation's next turn begins on what the cache has of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.server.serving import Live

from subten.engine import Tokenizer
from subten.formats.spec import PAGE_SIZE
from subten.server.conversations import Conversations
from support.tiny_model import byte_tokenizer


def turns(live: Live, count: int, words: str, **options: Any) -> list[tuple[int, int, int]]:
    """Of each turn of a chat: tokens of the prompt, of them from the cache, and of the answer."""
    client, messages, found = live.client(), [], []
    for turn in range(count):
        messages.append({"role": "user", "content": f"{words} {turn}"})
        answer = client.chat.completions.create(model=live.name, messages=messages, **options)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        found.append(
            (
                answer.usage.prompt_tokens,
                answer.usage.prompt_tokens_details.cached_tokens or 0,
                answer.usage.completion_tokens,
            )
        )
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_next_turn_is_taken_from_the_cache(demo_live: Live, seed: int) -> None:
    """A model without a template of its own, a vocabulary in which the same text can be cut in several ways."""
    found = turns(demo_live, 3, f"Tell me about number {seed}, at some length,", max_tokens=40, seed=seed)
    for (prompt, _, answer), (next_prompt, cached, _) in pairwise(found):
        new = next_prompt - prompt - answer
        assert cached >= next_prompt - new - PAGE_SIZE
        assert cached >= prompt + answer - 1 - 4


def test_other_conversations_between_the_turns_do_not_matter(server: Live) -> None:
    """The tiny model's answers are mostly no UTF-8: what clients send back is not what it wrote, but is its text."""
    client = server.client()
    messages: list[Any] = [{"role": "user", "content": "the first turn of it, with some words in it"}]
    asked: dict[str, Any] = {"model": server.name, "max_tokens": 30, "seed": 9}
    first = client.chat.completions.create(**asked, messages=messages)
    for number in range(3):
        client.chat.completions.create(**asked, messages=[{"role": "user", "content": f"somebody else {number}"}])
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and on"},
    ]
    second = client.chat.completions.create(**asked, messages=messages)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_remembered_tokens_are_used_and_forgotten() -> None:
    tokenizer, clock = Tokenizer(byte_tokenizer()), Clock()
    plain = tuple(tokenizer.encode("a.;d", add_special_tokens=False))
    conversations = Conversations(2, 10.0, clock)
    assert conversations.encode(tokenizer, "a.;d") == plain
    conversations.remember("a.", (7,))
    assert conversations.encode(tokenizer, "a.;d") == (7, *plain[2:])
    conversations.remember("a.;", (8,))
    assert conversations.encode(tokenizer, "a.;d") == (8, plain[3])
    clock.now = 6.0
    assert conversations.encode(tokenizer, "a.d") == (7, plain[3])
    clock.now = 12.0  # "a.;" was last used at 0, "a." at 6.
    assert conversations.encode(tokenizer, "a.;d") == (7, *plain[2:])
    conversations.remember("x", (1,))
    conversations.remember("y", (2,))  # Makes room of the least recently used one.
    assert conversations.encode(tokenizer, "a.;d") == plain


def test_an_answer_that_was_cut_off_is_not_taken_for_a_longer_one() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    conversations = Conversations(2, None)
    conversations.remember("say: Hel", (7,))
    assert conversations.encode(tokenizer, "say: Hello") == tuple(tokenizer.encode("say: Hello"))
    assert conversations.encode(tokenizer, "say: Hel<|end|>")[:2] == (7, tokenizer.encode("<|end|>")[0])


def test_control_tokens_of_an_answer_are_nobody_elses_prompt(server: Live) -> None:
    """They are no part of an answer's text: remembered by it, they would come to all who ask the same."""
    client = server.client()
    asked: dict[str, Any] = {
        "model": server.name,
        "messages": [{"role": "user", "content": "what everybody asks"}],
        "max_tokens": 10,
        "seed": 4,
    }
    before = client.chat.completions.create(**asked)
    begin = server.llm.tokenizer.backend.convert_tokens_to_ids("<|begin|>")
    silent = client.chat.completions.create(**asked, logit_bias={str(begin): 100})
    assert silent.choices[0].message.content == ""
    after = client.chat.completions.create(**asked)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.prompt_tokens == before.usage.prompt_tokens
    assert after.choices[0].message.content == before.choices[0].message.content
