"""Random lives of a cache: every plan is carried out on real memory, every sequence must read back its own tokens.

Each token leaves a stamp, a hash of itself and all tokens before it, wherever the cache keeps it. A page or window
that leaks from one sequence to another, is copied too late, or is freed too early shows as a wrong stamp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from subten.errors import CacheMemoryError
from subten.formats import PAGE_SIZE, CacheGeometry, KVFormat, PageLayout, get_format
from subten.kvcache import AppendPlan, CacheBooks, CacheStorage, predicted_bytes
from support.kv import CPU, POISON

GEOMETRY = CacheGeometry(num_layers=2, num_kv_heads=1, head_dim=16)
FORMATS = [
    get_format("bf16"),
    get_format("fp8"),
    get_format("kv2", sinks=0, recent=0),
    get_format("kv2", sinks=4, recent=16),
    get_format("kv2", sinks=70, recent=1),
    get_format("kv2", sinks=0, recent=64),
    get_format("kivi2", sinks=4, recent=16),
    get_format("kivi2", sinks=0, recent=0),
]
STAMP = 8


@dataclass
class Text:
    """Tokens and their stamps, uint8 [tokens, STAMP]."""

    tokens: list[int] = field(default_factory=list)
    stamps: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self.stamps[-1] if self.stamps else b""
            self.stamps.append(hashlib.blake2b(before + bytes([token]), digest_size=STAMP).digest())
            self.tokens.append(token)

    def prefix(self, length: int) -> Text:
        return Text(self.tokens[:length], self.stamps[:length])

    def stamped(self, width: int) -> NDArray[np.uint8]:
        """Stamps repeated to `width` bytes a token."""
        stamps = np.frombuffer(b"".join(self.stamps), dtype=np.uint8).reshape(-1, STAMP)
        return np.tile(stamps, -(-width // STAMP))[:, :width]


CODED_AT_ONCE = 32


def in_pages(fmt: KVFormat, length: int, ahead: int) -> int:
    """Tokens in pages once `length` were appended. Formats that code token by token code ahead: a CPU groups, a GPU
    the one that leaves next."""
    coded = fmt.coded_tokens(length)
    if fmt.granularity > 1:
        return coded
    wanted = fmt.coded_tokens(length + ahead) if ahead else -(-coded // CODED_AT_ONCE) * CODED_AT_ONCE
    return min(wanted, max(0, length - fmt.sinks))


class StampedMemory:
    """`CacheStorage` whose tokens are stamps: does to bytes what the append kernel does to keys and values."""

    def __init__(self, fmt: KVFormat, num_pages: int, num_windows: int, ahead: int) -> None:
        layout = PageLayout(fmt, GEOMETRY.head_dim, ahead)
        self.format = fmt
        self.storage = CacheStorage(layout, GEOMETRY, num_pages, num_windows, CPU)
        assert self.storage.nbytes == predicted_bytes(layout, GEOMETRY, num_pages, num_windows)
        self.pages = self.storage.pages.numpy().reshape(num_pages, PAGE_SIZE, -1)
        self.pages[:] = POISON
        self.window_width = GEOMETRY.elements(1) * layout.wide_dtype.itemsize

    def window(self, slot: int) -> NDArray[np.uint8]:
        """One slot as [window_size, layers, K and V, heads, bytes], a view."""
        raw: NDArray[np.uint8] = self.storage.windows[slot].view(dtype=self.storage.pages.dtype).numpy()
        return np.moveaxis(raw, -2, 0)

    def append(self, plan: AppendPlan, text: Text) -> None:
        """Carry out a plan for a sequence that then holds `text`."""
        self.storage.apply(plan.copies)
        fmt, length = self.format, plan.context_len + plan.new_tokens
        assert length == len(text.tokens)
        window = self.window(plan.window_slot)
        window_stamps = text.stamped(self.window_width).reshape(-1, *window.shape[1:])
        page_stamps = text.stamped(self.pages.shape[-1])
        ahead = self.storage.layout.ahead
        for index in range(in_pages(fmt, plan.context_len, ahead), in_pages(fmt, length, ahead)):
            position = fmt.sinks + index
            stamp = page_stamps[position]
            if position < plan.context_len:  # it comes out of the window, whatever is in there
                stamp = np.resize(window[self.slot(position)].ravel()[:STAMP], stamp.shape)
            self.pages[plan.block_table[index // PAGE_SIZE], index % PAGE_SIZE] = stamp
        for position in range(plan.context_len, length):
            if position < fmt.sinks or position >= fmt.sinks + fmt.coded_tokens(length):
                window[self.slot(position)] = window_stamps[position]

    def check(self, plan: AppendPlan, text: Text) -> None:
        """Assert that a sequence reads back as `text`."""
        fmt, length = self.format, len(text.tokens)
        assert plan.context_len == length
        coded = fmt.coded_tokens(length)
        table = np.array(plan.block_table, dtype=np.int64)
        read = self.pages[table].reshape(-1, self.pages.shape[-1])[:coded]
        assert np.array_equal(read, text.stamped(self.pages.shape[-1])[fmt.sinks : fmt.sinks + coded])
        window = self.window(plan.window_slot)
        uncoded = [p for p in range(length) if p < fmt.sinks or p >= fmt.sinks + coded]
        expected = text.stamped(self.window_width).reshape(-1, *window.shape[1:])
        assert np.array_equal(window[[self.slot(p) for p in uncoded]], expected[uncoded])

    def slot(self, position: int) -> int:
        sinks = self.format.sinks
        return position if position < sinks else sinks + (position - sinks) % self.format.ring_size


class CacheMachine(RuleBasedStateMachine):
    """Sequences are opened on known and unknown prefixes, grow, fork, are kept as snapshots, and go."""

    @initialize(
        fmt=st.sampled_from(FORMATS),
        pages=st.sampled_from([12, 6, 24]),
        windows=st.sampled_from([4, 3, 6]),
        ahead=st.integers(0, 1),
    )
    def start(self, fmt: KVFormat, pages: int, windows: int, ahead: int) -> None:
        self.memory = StampedMemory(fmt, pages, windows, ahead)
        self.books = CacheBooks(self.memory.storage.layout, pages, windows, b"machine")
        self.live: dict[int, Text] = {}
        self.known: list[Text] = [Text()]

    def any_live(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.live)), "sequence")

    def draw_tokens(self, data: st.DataObject) -> list[int]:
        count = data.draw(st.sampled_from([100, 64, 1, 20, 65]), "count")
        return [data.draw(st.integers(0, 1), "token")] * count

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known), "known text")
        length = len(known.tokens)
        prompt = known.prefix(data.draw(st.just(length) | st.integers(0, length), "known tokens"))
        prompt.extend(self.draw_tokens(data))
        free = self.books.windows.free
        try:
            hit = self.books.open(prompt.tokens)
        except CacheMemoryError:
            assert free == 0
            assert len(self.live) == self.books.windows.count, "snapshots make room for sequences"
            return
        assert 0 <= hit.length < len(prompt.tokens)
        self.memory.storage.apply(hit.copies)
        self.live[hit.sequence] = prompt.prefix(hit.length)
        self.grow(hit.sequence, prompt.tokens[hit.length :])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.grow(self.any_live(data), self.draw_tokens(data))

    def grow(self, sequence: int, tokens: list[int]) -> None:
        pages, windows = self.books.pages.free, self.books.windows.free
        text = self.live[sequence].prefix(len(self.live[sequence].tokens))
        text.extend(tokens)
        try:
            plan = self.books.append(sequence, tokens)
        except CacheMemoryError:
            assert (pages, windows) == (self.books.pages.free, self.books.windows.free), (
                "it failed and changed things"
            )
            return
        self.memory.append(plan, text)
        self.live[sequence] = text
        self.known = [*self.known, text][-8:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.any_live(data)
        try:
            hit = self.books.fork(parent)
        except CacheMemoryError:
            assert len(self.live) == self.books.windows.count, "snapshots make room for sequences"
            return
        self.memory.storage.apply(hit.copies)
        assert hit.length == len(self.live[parent].tokens)
        self.live[hit.sequence] = self.live[parent].prefix(hit.length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        sequence = self.any_live(data)
        text = self.live[sequence]
        self.memory.storage.apply(self.books.snapshot(sequence))
        if len(self.live) == self.books.windows.count:
            return
        # There was room for it, so it must be there: a sequence that goes on from here starts on all of it.
        if self.books.windows.free:
            hit = self.books.open([*text.tokens, 0])
            assert hit.length == len(text.tokens)
            self.memory.storage.apply(hit.copies)
            self.live[hit.sequence] = text.prefix(hit.length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.any_live(data)
        self.books.free(sequence)
        del self.live[sequence]

    @precondition(lambda self: self.books.windows.free < self.books.windows.count - len(self.live))
    @rule(sure=st.integers(0, 7))
    def drop_snapshots(self, sure: int) -> None:
        if sure:  # not too often, or there is never one to be found
            return
        self.books.drop_snapshots()
        assert self.books.windows.free == self.books.windows.count - len(self.live)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        self.books.check_integrity()
        assert sorted(self.books.lengths()) == sorted(len(text.tokens) for text in self.live.values())
        for sequence, text in self.live.items():
            assert self.books.length(sequence) == len(text.tokens)
            self.memory.check(self.books.append(sequence, []), text)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            for sequence in self.live:
                self.books.free(sequence)
            self.books.drop_snapshots()
            self.books.check_integrity()
            assert self.books.pages.free == self.books.pages.count
            assert self.books.windows.free == self.books.windows.count


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestCacheMachine = pytest.mark.filterwarnings("error")(CacheMachine.TestCase)
