from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subten.formats import PAGE_SIZE, KVFormat, PageLayout, get_format
from subten.formats.packing import slot_of_token
from subten.kernels.attention.attend import attend_reference
from support.attention import (
    Calibrate,
    Calibration,
    History,
    Paged,
    calibrated,
    cut,
    history,
    plain,
    removed_mean,
    with_calibrations,
)
from support.kv import CODED_NAMES, FORMAT_NAMES, POISON, encode

NAMES = st.sampled_from([*FORMAT_NAMES, "kivi2:kv4", "kv2:kivi2"])
WINDOWS = {"sinks": st.sampled_from([0, 1, 4, 64, 100]), "recent": st.sampled_from([0, 1, 16, 64])}


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def in_pages(fmt: KVFormat, length: int) -> int:
    """Tokens coded once `length` tokens were appended: those that left the window, and ahead of them what is there
    of their group of 32; formats that code by the page code nothing ahead."""
    coded = fmt.coded_tokens(length)
    if fmt.granularity > 1:
        return coded
    groups = {index // 32 for index in range(coded)}
    return len([index for index in range(length - fmt.sinks) if index // 32 in groups])


def coded_alone(past: History, layout: PageLayout, calibration: Calibration) -> Tensor:
    """What the codec writes for these tokens, the format's sinks left out."""
    behind = slice(layout.format.sinks, None)
    keys = past.k[behind] - removed_mean(calibration, past)[behind]
    return encode(layout, keys, past.v[behind], calibration.coding)


@settings(max_examples=60)
@given(
    name=NAMES,
    calibrate=st.sampled_from([plain, calibrated]),
    **WINDOWS,
    length=st.integers(1, 257),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
)
def test_pages_hold_the_coded_tokens_and_windows_the_others(
    name: str, calibrate: Calibrate, sinks: int, recent: int, length: int, sizes: list[int]
) -> None:
    """Whatever the chunks: tokens that left are coded as by the codec alone, the others lie in their slots."""
    layout = PageLayout(get_format(name, sinks, recent), 64)
    fmt = layout.format
    past = history(length, 2, 1, 64, dtype=torch.float32)
    paged = Paged(layout, 2, [length], calibrate=calibrate)
    for chunk in past.cut(cut(length, *sizes)):
        paged.append({0: chunk})

    if in_pages(fmt, length):
        written = past.part(0, fmt.sinks + in_pages(fmt, length))
        assert torch.equal(paged.pages_of(0), coded_alone(written, layout, paged.calibration))

    window = paged.window_of(0)
    for position in (p for p in range(length) if p < fmt.sinks or p >= fmt.sinks + fmt.coded_tokens(length)):
        slot = position if position < fmt.sinks else fmt.sinks + (position - fmt.sinks) % fmt.ring_size
        assert torch.equal(window[0, :, slot], past.k[position].to(layout.wide_dtype))
        assert torch.equal(window[1, :, slot], past.v[position].to(layout.wide_dtype))


@pytest.mark.parametrize("recent", [1, 40])
@with_calibrations(*(n for n in CODED_NAMES if get_format(n).granularity == 1))
def test_what_is_coded_ahead_is_not_read_ahead(name: str, calibrate: Calibrate, recent: int) -> None:
    """Its bytes may be anything at all, step after step, until the token leaves the window."""
    layout = PageLayout(get_format(name, 4, recent), 64)
    fmt, length = layout.format, 4 + recent + 70
    past = history(length, 2, 2, 64, dtype=torch.float32)
    paged = Paged(layout, 2, [length], calibrate=calibrate)
    poisoned = 0
    for chunk in past.cut([length - 35, *[1] * 35]):
        inputs, wide = paged.append({0: chunk})
        expected = attend_reference(chunk.q, wide, paged.cache, inputs, 0.11)
        sound = paged.cache.pages.clone()
        ahead = torch.arange(fmt.coded_tokens(paged.held[0]), in_pages(fmt, paged.held[0]))
        page, token = paged.tables[0, ahead // PAGE_SIZE].long(), ahead % PAGE_SIZE
        for plane in layout.planes:
            view = layout.view(paged.cache.pages, plane).view(torch.uint8)
            if plane == "value_codes":
                view = view.unflatten(-1, (PAGE_SIZE, -1)).transpose(-3, -2).flatten(-2)
            view[page, :, slot_of_token(token) if plane.endswith("_codes") else token] = POISON
        poisoned += len(ahead)
        assert torch.equal(attend_reference(chunk.q, wide, paged.cache, inputs, 0.11), expected)
        paged.cache.pages.copy_(sound)
    assert poisoned


@settings(max_examples=40)
@given(name=NAMES, **WINDOWS, lengths=st.tuples(*[st.integers(1, 200)] * 2), more=st.integers(1, 100))
def test_a_step_writes_to_its_own_sequences_only(
    name: str, sinks: int, recent: int, lengths: tuple[int, int], more: int
) -> None:
    layout = PageLayout(get_format(name, sinks, recent), 64)
    paged = Paged(layout, 2, (lengths[0] + more, lengths[1]))
    before, after = history(lengths[0] + more, 2, 1, 64, dtype=torch.float32).cut([lengths[0], more])
    paged.append({0: before, 1: history(lengths[1], 2, 1, 64, seed=9, dtype=torch.float32)})
    pages, windows = as_bytes(paged.cache.pages).clone(), as_bytes(paged.cache.windows).clone()
    paged.append({0: after})
    own_pages = paged.tables[0, : layout.pages_for(lengths[0] + more)].tolist()
    rest = [page for page in range(len(pages)) if page not in own_pages]
    assert torch.equal(paged.cache.pages[rest], pages[rest])
    rest = [slot for slot in range(len(windows)) if slot != paged.slots[0]]
    assert torch.equal(as_bytes(paged.cache.windows)[rest], windows[rest])


@settings(max_examples=40)
@given(name=NAMES, **WINDOWS, length=st.integers(0, 200), new=st.integers(1, 100))
def test_queries_are_handed_the_tokens_that_were_not_coded_before_the_step(
    name: str, sinks: int, recent: int, length: int, new: int
) -> None:
    layout = PageLayout(get_format(name, sinks, recent), 64)
    past = history(length + new, 2, 1, 64, dtype=torch.float32)
    paged = Paged(layout, 2, [past.length])
    if length:
        paged.append({0: past.part(0, length)})
    _, (wide,) = paged.append({0: past.part(length, length + new)})
    fmt = layout.format
    uncoded_before = range(fmt.sinks + fmt.coded_tokens(length), length)
    assert wide.positions.tolist() == [*range(min(fmt.sinks, length)), *uncoded_before, *range(length, length + new)]
    assert torch.equal(wide.keys, past.k[wide.positions].to(layout.wide_dtype))
    assert torch.equal(wide.values, past.v[wide.positions].to(layout.wide_dtype))


@with_calibrations(*FORMAT_NAMES)
def test_a_token_is_coded_from_its_16_bit_value(name: str, calibrate: Calibrate) -> None:
    """Codes must not depend on whether a token went through the window on its way or straight into its page."""
    layout = PageLayout(get_format(name, 0, 0), 64)
    x = [torch.randn(PAGE_SIZE, 2, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    paged = Paged(layout, 2, [PAGE_SIZE], calibrate=calibrate)
    paged.append({0: History(*x)})
    rounded = History(*(y.to(layout.wide_dtype).float() for y in x))
    assert torch.equal(paged.pages_of(0), coded_alone(rounded, layout, paged.calibration))
