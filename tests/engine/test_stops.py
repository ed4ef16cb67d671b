from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subten.engine.stops import StopMatcher

# Two letters make overlapping, nested and repeated matches common.
short_texts = st.text(alphabet="ab", max_size=30)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The cut on the whole text, read off the definition: the match complete first, then the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(text: str, cuts: list[int], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    pieces = [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.finish()], matcher.matched


@given(text=short_texts, stops=stop_sets, cuts=st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=400, deadline=None)
def test_any_streaming_equals_the_cut_on_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, matched = streamed(text, [min(cut, len(text)) for cut in cuts], stops)
    assert ("".join(shown), matched) == cut_at_first_stop(text, stops)


@given(text=short_texts, stops=stop_sets)
@settings(max_examples=200, deadline=None)
def test_what_is_shown_could_never_be_part_of_a_stop_string_and_no_more_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.matched is not None:
            break
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        beginnings = [text[start:end] for start in range(end) if any(s.startswith(text[start:end]) for s in stops)]
        assert held == max(beginnings, key=len, default="")


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["Hel", "lo <", "/s", "> more"], ["</s>"], ["Hel", "lo ", "", ""], "</s>"),
        (["a < b"], ["</s>"], ["a < b"], None),
        (["a <"], ["</s>"], ["a "], None),
        (["abcd"], ["abc", "b"], ["a"], "b"),
        (["xabc"], ["c", "abc", "bc"], ["x"], "abc"),
        (["aab", "ab"], ["aabab"], ["", ""], "aabab"),
        (["stop", "and", "on"], ["stop"], ["", "", ""], "stop"),
        (["text"], [], ["text"], None),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: list[str], matched: str | None) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == shown
    assert matcher.matched == matched


def test_finish_gives_the_held_text_once() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a </") == "a "
    assert matcher.finish() == "</"
    assert matcher.finish() == ""


def test_nothing_is_held_behind_a_match() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the end, en") == "the "
    assert matcher.finish() == ""
