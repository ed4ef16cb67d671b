from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subten.errors import CacheMemoryError
from subten.formats import PAGE_SIZE, CacheGeometry, KVFormat, PageLayout, get_format
from subten.kvcache import CacheBooks, CopyPlan
from subten.kvcache.pool import SlotPool
from subten.kvcache.prefix import chain, full_pages, page_hash

WINDOWED = get_format("kv2", sinks=4, recent=16)
WINDOWLESS = get_format("fp8")
either = pytest.mark.parametrize("fmt", [WINDOWED, WINDOWLESS], ids=["windowed", "windowless"])


def books_of(fmt: KVFormat, pages: int = 50, windows: int = 10, namespace: bytes = b"model") -> CacheBooks:
    return CacheBooks(PageLayout(fmt, 64), pages, windows, namespace)


def text(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ between seeds from the first one on."""
    return [seed * 10_000 + position for position in range(length)]


def opened(books: CacheBooks, tokens: list[int]) -> int:
    hit = books.open(tokens)
    books.append(hit.sequence, tokens[hit.length :])
    return hit.sequence


def leave_snapshot(books: CacheBooks, tokens: list[int]) -> None:
    sequence = opened(books, tokens)
    books.snapshot(sequence)
    books.free(sequence)


def reused(books: CacheBooks, tokens: list[int]) -> int:
    """Tokens that a prompt would find in the cache; the books end as they were, but for the order of use."""
    hit = books.open(tokens)
    books.free(hit.sequence)
    return hit.length


# --- pages and windows of one sequence -----------------------------------------------------------------------


@given(
    fmt=st.sampled_from(["kv2", "kivi2", "bf16", "fp8"]),
    sinks=st.sampled_from([0, 4, 64]),
    recent=st.sampled_from([0, 16, 128]),
    ahead=st.integers(0, 1),
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    step=st.integers(1, 300),
)
def test_predicted_bytes_are_what_the_pools_hand_out(
    fmt: str, sinks: int, recent: int, ahead: int, lengths: list[int], step: int
) -> None:
    layout, geometry = PageLayout(get_format(fmt, sinks, recent), 64, ahead), CacheGeometry(3, 2, 64)
    books = CacheBooks(layout, 40, 4)
    for seed, length in enumerate(lengths):
        sequence = books.open().sequence
        for start in range(0, length, step):
            plan = books.append(sequence, text(length, seed)[start : start + step])
            assert len(plan.block_table) == layout.pages_for(plan.context_len + plan.new_tokens)
    pages, windows = books.pages.count - books.pages.free, books.windows.count - books.windows.free
    held = pages * layout.page_bytes(geometry) + windows * layout.window_bytes(geometry)
    assert held == sum(layout.cache_bytes(geometry, length) for length in lengths)
    assert books.held_pages() == pages


def test_a_page_is_there_a_step_earlier_for_what_is_coded_ahead() -> None:
    """And a fork copies it before its own token goes there, though no token of it has left the window yet."""
    books = CacheBooks(PageLayout(WINDOWED, 64, ahead=1), 10, 4)
    sequence = books.open().sequence
    until = WINDOWED.sinks + WINDOWED.recent + PAGE_SIZE
    assert len(books.append(sequence, text(until - 1)).block_table) == 1
    at_the_edge = books.append(sequence, text(1)).block_table
    assert len(at_the_edge) == 2
    fork = books.fork(sequence).sequence
    plan = books.append(fork, text(1))
    assert plan.copies.pages == ((at_the_edge[1], plan.block_table[1]),)
    assert books.append(sequence, text(1)).block_table == at_the_edge
    books.check_integrity()


def test_a_plan_says_what_the_step_needs() -> None:
    books = books_of(WINDOWLESS)
    sequence = books.open().sequence
    first = books.append(sequence, text(70))
    assert (first.context_len, first.new_tokens, len(first.block_table)) == (0, 70, 2)
    pages = list(first.block_table)
    second = books.append(sequence, text(60))
    assert (second.context_len, second.new_tokens) == (70, 60)
    assert second.block_table[:2] == pages
    assert len(set(second.block_table)) == 3
    assert second.window_slot == first.window_slot
    assert first.copies == second.copies == CopyPlan()
    assert (books.length(sequence), books.lengths()) == (130, (130,))


@either
def test_free_and_dropped_snapshots_give_everything_back(fmt: KVFormat) -> None:
    books = books_of(fmt)
    sequences = [opened(books, text(200, seed)) for seed in range(3)]
    books.snapshot(sequences[0])
    sequences.append(books.fork(sequences[1]).sequence)
    for sequence in sequences:
        books.free(sequence)
    assert books.pages.free < books.pages.count
    books.drop_snapshots()
    assert (books.pages.free, books.windows.free) == (books.pages.count, books.windows.count)
    books.check_integrity()
    assert reused(books, text(300)) == 0


# --- too little memory ---------------------------------------------------------------------------------------


@either
def test_a_failed_append_changes_nothing_and_can_be_repeated(fmt: KVFormat) -> None:
    books = books_of(fmt, pages=4)
    leave_snapshot(books, text(100, seed=1))
    sequence = opened(books, text(100))
    with pytest.raises(CacheMemoryError, match=r"the cache has \d of 4 pages free where \d are needed"):
        books.append(sequence, text(400))
    books.check_integrity()
    assert books.length(sequence) == 100
    assert reused(books, text(120, seed=1)) == 100, "the snapshot is still there"
    plan = books.append(sequence, text(10))
    assert (plan.context_len, plan.new_tokens) == (100, 10)


@either
def test_without_a_free_window_nothing_is_opened_or_forked(fmt: KVFormat) -> None:
    books = books_of(fmt, windows=2)
    first, _ = opened(books, text(100)), opened(books, text(100, seed=1))
    with pytest.raises(CacheMemoryError, match="the cache has 0 of 2 window slots free where 1 are needed"):
        books.open(text(50))
    with pytest.raises(CacheMemoryError, match="window slot"):
        books.fork(first)
    assert books.snapshot(first) == CopyPlan(), "live sequences go before snapshots"
    books.check_integrity()
    assert books.lengths() == (100, 100)


@either
def test_the_least_recently_used_snapshot_makes_room_first(fmt: KVFormat) -> None:
    books = books_of(fmt, windows=4)
    for seed in (1, 2, 3):
        leave_snapshot(books, text(100, seed))
    assert reused(books, text(120, seed=1)) == 100, "used again, so now the most recent"
    fresh = [books.open(text(50, seed)).sequence for seed in (8, 9)]
    for sequence in fresh:
        books.free(sequence)
    assert {seed: reused(books, text(120, seed)) for seed in (1, 2, 3)} == {1: 100, 2: 0, 3: 100}


@either
def test_pages_are_taken_from_as_few_snapshots_as_needed(fmt: KVFormat) -> None:
    per_text = PageLayout(fmt, 64).pages_for(200)
    books = books_of(fmt, pages=4 * per_text)
    for seed in (1, 2, 3):
        leave_snapshot(books, text(200, seed))
    sequence = opened(books, text(200, seed=4))
    assert books.pages.free == 0
    books.append(sequence, text(PAGE_SIZE, seed=5))
    assert {seed: reused(books, text(220, seed)) for seed in (1, 2, 3)} == {1: 0, 2: 200, 3: 200}


@either
def test_a_prefix_is_not_dropped_to_make_room_for_its_own_reader(fmt: KVFormat) -> None:
    books = books_of(fmt, windows=3)
    leave_snapshot(books, text(100, seed=1))
    leave_snapshot(books, text(100, seed=2))
    opened(books, text(10, seed=3))
    assert books.open(text(120, seed=1)).length == 100


@either
def test_the_last_snapshot_gives_way_even_to_its_own_reader(fmt: KVFormat) -> None:
    books = books_of(fmt, windows=2)
    leave_snapshot(books, text(100))
    opened(books, text(100, seed=1))
    assert books.open(text(120)).length == 0
    books.check_integrity()


def test_pages_of_a_snapshot_that_had_to_go_are_not_found_any_more() -> None:
    """Without windows a prompt may begin on the pages of a snapshot it does not extend; those can go with it."""
    books = books_of(WINDOWLESS, windows=2)
    leave_snapshot(books, text(200))
    diverging = [*text(130), *text(100, seed=1)]
    live = opened(books, text(10, seed=2))
    assert books.open(diverging).length == 0
    books.check_integrity()
    books.free(live)


# --- prefixes ------------------------------------------------------------------------------------------------


@either
def test_a_prompt_starts_on_the_longest_snapshot_that_it_extends(fmt: KVFormat) -> None:
    books = books_of(fmt)
    sequence = books.open().sequence
    for length in (10, 100, 150, 300):
        books.append(sequence, text(300)[books.length(sequence) : length])
        books.snapshot(sequence)
    books.free(sequence)
    for asked, found in ((10, 0), (11, 10), (100, 10), (101, 100), (150, 100), (151, 150), (300, 150), (301, 300)):
        expected = found if fmt.window_size else max(found, (asked - 1) // PAGE_SIZE * PAGE_SIZE)
        assert reused(books, text(asked)) == expected


@either
@pytest.mark.parametrize("changed", [0, 3, 4, 60, 67, 68, 99, 131, 132, 149])
def test_a_snapshot_is_not_used_where_any_token_differs(fmt: KVFormat, changed: int) -> None:
    books = books_of(fmt)
    leave_snapshot(books, text(150))
    other = text(200)
    other[changed] += 1
    assert reused(books, other) == (0 if fmt.window_size else changed // PAGE_SIZE * PAGE_SIZE)
    assert reused(books, text(200)) == 150


def test_full_pages_of_a_live_sequence_are_reused_where_there_are_no_windows() -> None:
    books = books_of(WINDOWLESS)
    plan = books.append(books.open().sequence, text(200))
    for asked, found in ((64, 0), (65, 64), (128, 64), (129, 128), (192, 128), (193, 192), (250, 192)):
        hit = books.open(text(asked))
        assert hit.length == found
        assert books.append(hit.sequence, []).block_table == plan.block_table[: found // PAGE_SIZE]
        assert hit.copies == CopyPlan(), "pages that nobody writes to again are shared, not copied"
        books.free(hit.sequence)
    books.check_integrity()


def test_with_windows_pages_alone_are_not_enough() -> None:
    books = books_of(WINDOWED)
    opened(books, text(300))
    assert reused(books, text(400)) == 0


def test_a_sequence_opened_on_a_prefix_is_itself_a_prefix_for_others() -> None:
    books = books_of(WINDOWLESS)
    opened(books, text(100))
    second = opened(books, text(300))
    assert books.open(text(301)).length == 256
    books.free(second)
    assert books.open(text(301)).length == 256, "the third holds the pages of the second"


@either
def test_a_longer_turn_of_a_conversation_extends_its_own_snapshot(fmt: KVFormat) -> None:
    books = books_of(fmt)
    conversation: list[int] = []
    for turn in range(5):
        conversation += text(70, seed=turn)
        hit = books.open(conversation)
        assert hit.length == 70 * turn
        books.append(hit.sequence, conversation[hit.length :])
        books.snapshot(hit.sequence)
        books.free(hit.sequence)
    books.check_integrity()


@either
def test_books_of_another_namespace_share_no_hash(fmt: KVFormat) -> None:
    here, there = chain(b"here", text(300), fmt), chain(b"there", text(300), fmt)
    assert len(here) == full_pages(300, fmt) > 0
    assert not set(here) & set(there)


@either
def test_an_equal_snapshot_is_kept_once_and_counts_as_used(fmt: KVFormat) -> None:
    books = books_of(fmt, windows=4)
    first, second = opened(books, text(100)), opened(books, text(100, seed=1))
    assert books.snapshot(first).windows
    assert books.snapshot(second).windows
    assert books.snapshot(first) == CopyPlan()
    books.free(first)
    books.free(second)
    fresh = [books.open(text(50, seed)).sequence for seed in (7, 8, 9)]
    for sequence in fresh:
        books.free(sequence)
    assert (reused(books, text(120)), reused(books, text(120, seed=1))) == (100, 0)


@given(
    length=st.integers(0, 300),
    cut=st.integers(0, 300),
    changed=st.integers(0, 299),
    fmt=st.sampled_from([WINDOWED, WINDOWLESS, get_format("kivi2", 70, 3)]),
)
def test_hashes_chain_over_all_tokens_before_a_pages_end(length: int, cut: int, changed: int, fmt: KVFormat) -> None:
    tokens = text(length)
    hashes = chain(b"", tokens, fmt)
    assert len(hashes) == full_pages(length, fmt) == len(range(fmt.sinks + PAGE_SIZE, length + 1, PAGE_SIZE))
    assert chain(b"", tokens[:cut], fmt) == hashes[: full_pages(min(cut, length), fmt)]
    if changed >= length:
        return
    other = chain(b"", [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]], fmt)
    same = [a == b for a, b in zip(hashes, other, strict=True)]
    assert same == [fmt.sinks + PAGE_SIZE * (page + 1) <= changed for page in range(len(hashes))]


def test_hashes_do_not_confuse_tokens_that_look_alike_in_bytes() -> None:
    assert page_hash(b"", [1, 2]) != page_hash(b"", [2 * 256 + 1])
    assert page_hash(b"", [0, 1]) != page_hash(b"", [1, 0])
    assert page_hash(b"", [0]) != page_hash(b"", [0, 0])


# --- forks ---------------------------------------------------------------------------------------------------


def test_a_fork_shares_pages_until_one_of_the_two_writes() -> None:
    books = books_of(WINDOWLESS)
    parent = opened(books, text(100))
    fork = books.fork(parent)
    assert fork.length == 100
    before = books.append(parent, []).block_table
    assert books.append(fork.sequence, []).block_table == before

    child_plan = books.append(fork.sequence, text(5, seed=1))
    assert child_plan.block_table[0] == before[0], "the full page stays shared"
    assert child_plan.copies.pages == ((before[1], child_plan.block_table[1]),), "the partly filled one is copied"
    parent_plan = books.append(parent, text(5, seed=2))
    assert parent_plan.copies == CopyPlan(), "its second holder has left"
    assert parent_plan.block_table == before


def test_a_fork_copies_the_window() -> None:
    books = books_of(WINDOWED)
    parent = opened(books, text(100))
    fork = books.fork(parent)
    slots = books.append(parent, []).window_slot, books.append(fork.sequence, []).window_slot
    assert fork.copies == CopyPlan(windows=(slots,))


def test_appending_into_the_window_alone_copies_no_page() -> None:
    books = books_of(get_format("kv2", sinks=4, recent=16))
    parent = opened(books, text(10))
    fork = books.fork(parent)
    assert books.append(fork.sequence, text(10)).copies == CopyPlan()


def test_pages_coded_as_a_whole_are_never_copied() -> None:
    books = books_of(get_format("kivi2", sinks=4, recent=16))
    parent = opened(books, text(200))
    fork = books.fork(parent)
    for seed in range(100):
        assert books.append(fork.sequence, text(1, seed)).copies == CopyPlan()


@either
def test_freeing_a_parent_leaves_its_fork_alone(fmt: KVFormat) -> None:
    books = books_of(fmt)
    parent = opened(books, text(200))
    fork = books.fork(parent)
    table = books.append(fork.sequence, []).block_table
    books.free(parent)
    books.check_integrity()
    assert books.append(fork.sequence, []).block_table == table
    assert books.held_pages() == len(table)


# --- the pool ------------------------------------------------------------------------------------------------


def test_a_pool_hands_out_all_or_none() -> None:
    pool = SlotPool(5, "page")
    first = pool.allocate(3)
    with pytest.raises(CacheMemoryError, match="the cache has 2 of 5 pages free where 3 are needed"):
        pool.allocate(3)
    assert pool.free == 2
    assert sorted(first + pool.allocate(2)) == list(range(5))
    assert pool.allocate(0) == []


def test_a_shared_slot_is_free_after_its_last_holder() -> None:
    pool = SlotPool(2, "page")
    (slot,) = pool.allocate(1)
    pool.retain([slot])
    assert pool.release([slot]) == []
    assert (pool.references(slot), pool.free) == (1, 1)
    assert pool.release([slot]) == [slot]
    assert (pool.references(slot), pool.free) == (0, 2)


def test_a_pool_notices_slots_that_are_not_held() -> None:
    pool = SlotPool(2, "page")
    with pytest.raises(AssertionError, match="page 1 is not allocated"):
        pool.retain([1])
    with pytest.raises(AssertionError, match="page 1 is released twice"):
        pool.release([1])


def test_the_integrity_check_notices_a_lost_page() -> None:
    books = books_of(WINDOWLESS)
    opened(books, text(100))
    books.pages.allocate(1)
    with pytest.raises(AssertionError, match="do not match the holders"):
        books.check_integrity()
