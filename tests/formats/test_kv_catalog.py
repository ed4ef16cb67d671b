from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subten.errors import UnknownFormatError
from subten.formats import DEFAULT_FORMAT, FORMATS, PAGE_SIZE, get_format
from support.kv import FORMAT_NAMES

any_name = st.sampled_from(FORMAT_NAMES)
windows = st.integers(0, 300)


def test_the_catalog_is_keyed_by_name_and_has_the_promised_formats() -> None:
    assert all(fmt.name == name and fmt.summary for name, fmt in FORMATS.items())
    assert {"bf16", "fp8", "int4", "kv4", "kv2", "k4v2", "kivi2", "article2"} <= set(FORMATS)
    assert DEFAULT_FORMAT == "kv2"
    assert get_format("kv2") == FORMATS["kv2"]


def test_the_default_windows_are_64_sinks_and_128_recent_tokens() -> None:
    assert (FORMATS["kv2"].sinks, FORMATS["kv2"].recent) == (64, 128)


def test_keys_and_values_can_come_from_two_formats() -> None:
    mixed = get_format("kv4:kv2")
    assert (mixed.key, mixed.value) == (FORMATS["kv4"].key, FORMATS["kv2"].value)
    assert (mixed.key, mixed.value) == (FORMATS["k4v2"].key, FORMATS["k4v2"].value)
    assert mixed.name == "kv4:kv2"
    assert "kv4" in mixed.summary
    assert "kv2" in mixed.summary


def test_a_mix_takes_the_larger_windows_and_the_coarser_granularity() -> None:
    assert (get_format("fp8:kv2").sinks, get_format("fp8:kv2").recent) == (64, 128)
    assert get_format("kv2:kivi2").granularity == 1, "kivi2 codes only its keys by the page"
    assert get_format("kivi2:kv2").granularity == PAGE_SIZE


def test_other_windows_can_be_asked_for() -> None:
    fmt = get_format("kv2", sinks=4, recent=32)
    assert (fmt.sinks, fmt.recent, fmt.window_size) == (4, 32, 36)
    assert (fmt.key, fmt.value, fmt.name) == (FORMATS["kv2"].key, FORMATS["kv2"].value, "kv2")
    assert get_format("kv2", recent=5).sinks == 64
    assert get_format("kv4:kv2", 0, 0).window_size == 0


def test_formats_that_code_nothing_have_no_windows() -> None:
    for name in ("bf16", "fp32"):
        assert get_format(name, 4, 32) == FORMATS[name]
        assert FORMATS[name].window_size == 0


@pytest.mark.parametrize(
    "name", ["", "kv3", "KV2", "kv2 ", ":", "kv2:", ":kv2", "kv2:kv3", "kv3:kv2", "kv2:kv2:kv2", "kv2/kv4"]
)
def test_an_unknown_name_is_refused_with_the_names_that_exist(name: str) -> None:
    with pytest.raises(UnknownFormatError) as refused:
        get_format(name)
    message = str(refused.value)
    assert f"'{name}'" in message
    assert all(known in message for known in FORMATS)


@pytest.mark.parametrize("name", ["bf16:kv2", "kv2:bf16", "fp32:kv2", "kv2:fp32", "bf16:fp32", "bf16:fp8"])
def test_coded_and_uncoded_tensors_do_not_mix(name: str) -> None:
    with pytest.raises(UnknownFormatError, match="must both be coded"):
        get_format(name)


@pytest.mark.parametrize(("sinks", "recent"), [(-1, 0), (0, -1), (-3, -4), (-1, None), (None, -64)])
def test_negative_windows_are_refused(sinks: int | None, recent: int | None) -> None:
    with pytest.raises(UnknownFormatError, match="must be 0 or more"):
        get_format("kv2", sinks, recent)


@given(name=any_name, sinks=windows, recent=windows, length=st.integers(0, 1000))
def test_a_token_is_coded_exactly_when_it_has_left_the_recent_window(
    name: str, sinks: int, recent: int, length: int
) -> None:
    """The rule, token by token: not a sink, not among the last `recent`, and its page complete where that matters."""
    fmt = get_format(name, sinks, recent)
    left = [p for p in range(length) if p >= fmt.sinks and p <= length - 1 - fmt.recent]
    if fmt.granularity > 1:
        left = [p for p in left if fmt.sinks + (p - fmt.sinks) // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE - 1 in left]
    assert fmt.coded_tokens(length) == len(left)
    assert left == list(range(fmt.sinks, fmt.sinks + len(left)))


@given(name=any_name, sinks=windows, recent=windows, length=st.integers(0, 1000))
def test_the_windows_hold_every_token_that_is_not_coded(name: str, sinks: int, recent: int, length: int) -> None:
    """No two uncoded tokens behind the sinks share a slot of the ring, and the ring is never larger than needed."""
    fmt = get_format(name, sinks, recent)
    behind_sinks = range(fmt.sinks + fmt.coded_tokens(length), length)
    assert len(behind_sinks) <= fmt.ring_size
    slots = {(p - fmt.sinks) % fmt.ring_size for p in behind_sinks}
    assert len(slots) == len(behind_sinks)
    assert fmt.window_size == fmt.sinks + fmt.ring_size
    fullest = max(n - fmt.sinks - fmt.coded_tokens(n) for n in range(fmt.sinks, fmt.sinks + recent + 2 * PAGE_SIZE))
    assert fullest == fmt.ring_size


@given(name=any_name, sinks=windows, recent=windows, length=st.integers(0, 1000), more=st.integers(0, 200))
def test_a_coded_token_stays_coded(name: str, sinks: int, recent: int, length: int, more: int) -> None:
    fmt = get_format(name, sinks, recent)
    assert fmt.coded_tokens(length) <= fmt.coded_tokens(length + more) <= fmt.coded_tokens(length) + more + 63
