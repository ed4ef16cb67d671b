"""The books of the cache: which sequence owns which pages and windows, who shares them, what may be reused.

Nothing here reads or writes a cached byte. Every method either returns a plan that the runner carries out, or
raises and leaves the books as they were.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from subten.formats.layout import PageLayout
from subten.formats.spec import PAGE_SIZE, KVFormat
from subten.kvcache.plans import AppendPlan, CopyPlan
from subten.kvcache.pool import SlotPool
from subten.kvcache.prefix import chain, full_pages, page_hash

_NO_COPIES = CopyPlan()


@dataclass
class _Sequence:
    """A live sequence. `hashes` covers the pages whose tokens are all known, `tail` the tokens behind them; up to
    `room` tokens, its pages do as they are."""

    window_slot: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    room: int = 0


@dataclass
class _Snapshot:
    """A copy of a sequence: references to its pages, and its windows as they were. Only `used` ever changes."""

    window_slot: int
    length: int
    pages: tuple[int, ...]
    used: float
    """When it was made, or last taken up."""


class _SnapshotKey(NamedTuple):
    last_page: bytes
    tail: tuple[int, ...]


class PrefixHit(NamedTuple):
    """A new sequence, how many of the asked tokens it already holds, and the copies that make it so."""

    sequence: int
    length: int
    copies: CopyPlan


class CacheBooks:
    """Sequences, snapshots and the two pools they draw from.

    Args:
        layout: page layout of the format.
        num_pages: pages in the pool.
        num_windows: window slots in the pool: one per live sequence and per snapshot.
        namespace: what must be equal for tokens to have equal pages (model, format, rule).
        snapshot_ttl: seconds after which a snapshot that nobody has taken up is dropped; None keeps it.
        clock: tells seconds.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        num_windows: int,
        namespace: bytes = b"",
        snapshot_ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.format: KVFormat = layout.format
        self._layout = layout
        self._namespace = namespace
        self._snapshot_ttl = snapshot_ttl
        self._clock = clock
        self.pages = SlotPool(num_pages, "page")
        self.windows = SlotPool(num_windows, "window slot")
        self._sequences: dict[int, _Sequence] = {}
        self._snapshots: OrderedDict[_SnapshotKey, _Snapshot] = OrderedDict()
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}
        self._next_id = 0

    # --- sequences -------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int] = ()) -> PrefixHit:
        """Begin a sequence, on the longest cached prefix of `tokens` that is not all of them.

        With windows, a prefix can only be taken up where a snapshot was made (`snapshot`): the 16-bit windows
        at that point are part of the state. Without windows, any run of full pages will do as well.

        Raises:
            CacheMemoryError: no window slot is free.
        """
        self.expire()
        hashes = chain(self._namespace, tokens, self.format)
        # Looking it up makes the snapshot the last one to be dropped for a free slot; pages are looked up behind
        # that, since they may be gone with a snapshot.
        key = self._longest_snapshot(tokens, hashes)
        (slot,) = self._allocate(self.windows, 1)
        snapshot = self._snapshots.get(key) if key else None
        pages = self._longest_page_run(tokens, hashes)
        sequence = _Sequence(slot, len(pages) * PAGE_SIZE, pages)
        copies = CopyPlan()
        if snapshot and snapshot.length >= sequence.length:
            sequence = _Sequence(slot, snapshot.length, list(snapshot.pages))
            copies = CopyPlan(windows=((snapshot.window_slot, slot),))
        self.pages.retain(sequence.pages)
        sequence.hashes = hashes[: full_pages(sequence.length, self.format)]
        sequence.tail = list(tokens[self._hashed_until(sequence) : sequence.length])
        return PrefixHit(self._enter(sequence), sequence.length, copies)

    def append(self, sequence: int, tokens: Sequence[int]) -> AppendPlan:
        """Make room for `tokens` behind what the sequence holds.

        Raises:
            CacheMemoryError: the pages would not suffice even without the snapshots; nothing has changed.
        """
        state = self._sequences[sequence]
        length = state.length + len(tokens)
        copies = _NO_COPIES if length <= state.room else self._make_room(state, length)
        plan = AppendPlan(state.length, len(tokens), state.pages, state.window_slot, copies)
        state.length = length
        self._extend_hashes(state, tokens)
        return plan

    def _make_room(self, state: _Sequence, length: int) -> CopyPlan:
        before, after = (self._layout.tokens_in_pages(tokens_held) for tokens_held in (state.length, length))
        shared = before % PAGE_SIZE and after > before and self.pages.references(state.pages[-1]) > 1
        missing = self._layout.pages_for(length) - len(state.pages)
        fresh = self._allocate(self.pages, missing + bool(shared))
        copies = _NO_COPIES
        if shared:
            last = state.pages.pop()
            # An eviction in `_allocate` may have left this sequence the only holder; a copy is still right.
            self._release_pages([last])
            copies = CopyPlan(pages=((last, fresh[0]),))
        state.pages += fresh
        state.room = length
        if self.format.granularity == 1 and state.pages and self.pages.references(state.pages[-1]) == 1:
            # A token more is one more in the pages at most.
            state.room += len(state.pages) * PAGE_SIZE - after
        return copies

    def fork(self, sequence: int) -> PrefixHit:
        """A second sequence with the same content. Pages are shared until one of the two writes to them.

        Raises:
            CacheMemoryError: no window slot is free.
        """
        parent = self._sequences[sequence]
        (slot,) = self._allocate(self.windows, 1)
        self._share(parent)
        child = _Sequence(slot, parent.length, list(parent.pages), list(parent.hashes), list(parent.tail))
        return PrefixHit(self._enter(child), child.length, CopyPlan(windows=((parent.window_slot, slot),)))

    def free(self, sequence: int) -> None:
        """Forget a sequence and give back what nobody else holds."""
        state = self._sequences.pop(sequence)
        self._release_pages(state.pages)
        self.windows.release([state.window_slot])

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        return self._sequences[sequence].length

    def lengths(self) -> tuple[int, ...]:
        """Tokens that each live sequence holds."""
        return tuple(s.length for s in self._sequences.values())

    def held_pages(self) -> int:
        """Distinct pages that live sequences hold; a page shared by forks counts once."""
        return len({page for s in self._sequences.values() for page in s.pages})

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """The pages that a sequence holds, in order."""
        return tuple(self._sequences[sequence].pages)

    def window_of(self, sequence: int) -> int:
        """The window slot that a sequence holds."""
        return self._sequences[sequence].window_slot

    @property
    def available_pages(self) -> int:
        """Pages that are free, or would be if all snapshots were dropped."""
        return self.pages.free + self._reclaimable(self.pages)

    # --- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self, sequence: int) -> CopyPlan:
        """Keep a sequence's present state for reuse by `open`, until the memory is needed elsewhere.

        Does nothing where an equal snapshot exists, or where every window slot belongs to a live sequence.
        """
        state = self._sequences[sequence]
        key = _SnapshotKey(self._last_hash(state), tuple(state.tail))
        if key in self._snapshots:
            self._touch(key)
            return CopyPlan()
        if not self.windows.free and not self._snapshots:
            return CopyPlan()
        (slot,) = self._allocate(self.windows, 1)
        self._share(state)
        self._snapshots[key] = _Snapshot(slot, state.length, tuple(state.pages), self._clock())
        return CopyPlan(windows=((state.window_slot, slot),))

    @property
    def snapshots(self) -> int:
        """Snapshots that are kept."""
        return len(self._snapshots)

    def expire(self) -> None:
        """Forget the snapshots that nobody has taken up for too long."""
        if self._snapshot_ttl is None:
            return
        oldest = self._clock() - self._snapshot_ttl
        while self._snapshots and next(iter(self._snapshots.values())).used <= oldest:
            self._evict(next(iter(self._snapshots)))

    def drop_snapshots(self) -> None:
        """Forget every snapshot."""
        while self._snapshots:
            self._evict(next(iter(self._snapshots)))

    # --- invariants ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that the pools' reference counts are exactly what sequences and snapshots hold."""
        holders: list[_Sequence | _Snapshot] = [*self._sequences.values(), *self._snapshots.values()]
        for pool, held in (
            (self.pages, Counter(page for h in holders for page in h.pages)),
            (self.windows, Counter(h.window_slot for h in holders)),
        ):
            counted = {slot: pool.references(slot) for slot in range(pool.count) if pool.references(slot)}
            assert counted == dict(held), "reference counts do not match the holders"
            assert pool.free == pool.count - len(held), "a slot is neither held nor free"
        for state in self._sequences.values():
            assert len(state.pages) == self._layout.pages_for(state.length), "wrong number of pages"
        assert all(self.pages.references(page) for page in self._hash_of_page), "an indexed page is free"
        inverse = {digest: page for page, digest in self._hash_of_page.items()}
        assert inverse == self._page_of_hash, "the two sides of the page index differ"

    # --- inner parts -----------------------------------------------------------------------------------------

    def _share(self, state: _Sequence) -> None:
        """Somebody else holds the sequence's pages now as well."""
        self.pages.retain(state.pages)
        state.room = state.length

    def _enter(self, state: _Sequence) -> int:
        self._next_id += 1
        self._sequences[self._next_id] = state
        return self._next_id

    def _hashed_until(self, state: _Sequence) -> int:
        """Positions that `state.hashes` covers: the sinks belong to the first page's hash."""
        return self.format.sinks + len(state.hashes) * PAGE_SIZE if state.hashes else 0

    def _last_hash(self, state: _Sequence) -> bytes:
        return state.hashes[-1] if state.hashes else self._namespace

    def _extend_hashes(self, state: _Sequence, tokens: Sequence[int]) -> None:
        state.tail += tokens
        while True:
            size = PAGE_SIZE if state.hashes else self.format.sinks + PAGE_SIZE
            if len(state.tail) < size:
                break
            digest = page_hash(self._last_hash(state), state.tail[:size])
            state.hashes.append(digest)
            del state.tail[:size]
            if not self.format.window_size and digest not in self._page_of_hash:
                page = state.pages[len(state.hashes) - 1]
                self._page_of_hash[digest], self._hash_of_page[page] = page, digest

    def _longest_snapshot(self, tokens: Sequence[int], hashes: Sequence[bytes]) -> _SnapshotKey | None:
        """The longest snapshot that `tokens` properly extends; looking it up makes it the most recently used."""
        best: _SnapshotKey | None = None
        for key, snapshot in self._snapshots.items():
            depth = full_pages(snapshot.length, self.format)
            if snapshot.length >= len(tokens) or (depth and hashes[depth - 1] != key.last_page):
                continue
            start = snapshot.length - len(key.tail)
            longer = best is None or snapshot.length > self._snapshots[best].length
            if longer and tuple(tokens[start : snapshot.length]) == key.tail:
                best = key
        if best:
            self._touch(best)
        return best

    def _longest_page_run(self, tokens: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Cached full pages that `tokens` begins with, leaving at least one token; formats without windows only."""
        pages: list[int] = []
        if self.format.window_size:
            return pages
        for digest in hashes[: full_pages(len(tokens) - 1, self.format)]:
            if digest not in self._page_of_hash:
                break
            pages.append(self._page_of_hash[digest])
        return pages

    def _allocate(self, pool: SlotPool, count: int) -> list[int]:
        """Allocate, dropping the least recently used snapshots while too little is free.

        None is dropped where even all of them would not make room.
        """
        if pool.free < count <= pool.free + self._reclaimable(pool):
            while pool.free < count:
                self._evict(next(iter(self._snapshots)))
        return pool.allocate(count)

    def _reclaimable(self, pool: SlotPool) -> int:
        """Slots that only snapshots hold."""
        if pool is self.windows:
            return len(self._snapshots)
        held = Counter(page for snapshot in self._snapshots.values() for page in snapshot.pages)
        return sum(self.pages.references(page) == count for page, count in held.items())

    def _touch(self, key: _SnapshotKey) -> None:
        self._snapshots.move_to_end(key)
        self._snapshots[key].used = self._clock()

    def _evict(self, key: _SnapshotKey) -> None:
        snapshot = self._snapshots.pop(key)
        self._release_pages(snapshot.pages)
        self.windows.release([snapshot.window_slot])

    def _release_pages(self, pages: Sequence[int]) -> None:
        for page in self.pages.release(pages):
            digest = self._hash_of_page.pop(page, None)
            if digest is not None:
                del self._page_of_hash[digest]
