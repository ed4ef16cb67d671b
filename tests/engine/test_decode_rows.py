from __future__ import annotations

import pytest
import torch

from subten.engine.decode_rows import NO_SLOT, DecodeRows, DecodeWork, Draw
from subten.engine.sampling import SamplingParams
from subten.kvcache import AppendPlan, CopyPlan

GREEDY = Draw(SamplingParams(temperature=0), 0)
NO_COPIES = CopyPlan()


def work(
    token: int,
    context: int,
    pages: list[int],
    *,
    sequence: int = 1,
    draw: Draw = GREEDY,
    copies: CopyPlan = NO_COPIES,
) -> DecodeWork:
    return DecodeWork(sequence, AppendPlan(context, 1, pages, 10 + sequence, copies), token, draw)


@pytest.fixture
def rows() -> DecodeRows:
    return DecodeRows(4, 8, "chunk", torch.device("cpu"))


def content(rows: DecodeRows, count: int) -> list[tuple[int, int, int, int]]:
    """Token, position, context and window of each row."""
    inputs = rows.inputs(count)
    columns = inputs.token_ids, inputs.positions, inputs.attention.context_len, inputs.attention.window_slot
    return list(zip(*(column.tolist() for column in columns), strict=True))


def step(rows: DecodeRows, *tokens: int) -> None:
    rows.move_on(len(tokens), torch.tensor(tokens))
    rows.moved_on(tokens)


def test_rows_move_on_by_themselves_and_empty_ones_stay(rows: DecodeRows) -> None:
    rows.place([work(5, 64, [3, 1])])
    assert content(rows, 2) == [(5, 64, 64, 11), (0, 0, 0, NO_SLOT)]
    step(rows, 7)
    rows.move_on(2, torch.tensor([8, 9]))
    assert [row[1:] for row in content(rows, 2)] == [(66, 66, 11), (0, 0, NO_SLOT)]


def test_nothing_is_written_where_the_step_has_left_what_the_host_wants(rows: DecodeRows) -> None:
    rows.place([work(5, 64, [3, 1])])
    step(rows, 7)
    rows.token_ids[0], rows.positions[0] = 70, 650  # Whoever wrote here would be seen.
    rows.place([work(7, 65, [3, 1])])
    assert content(rows, 1) == [(70, 650, 65, 11)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (work(8, 65, [3, 1]), (8, 65, 65, 11)),
        (work(7, 60, [3, 1]), (7, 60, 60, 11)),
        (work(7, 65, [3, 1], sequence=2), (7, 65, 65, 12)),
    ],
    ids=["another token", "another place", "another sequence"],
)
def test_what_the_host_knows_better_is_written(
    rows: DecodeRows, wanted: DecodeWork, expected: tuple[int, int, int, int]
) -> None:
    rows.place([work(5, 64, [3, 1])])
    step(rows, 7)
    rows.place([wanted])
    assert content(rows, 1) == [expected]


def test_pages_that_are_added_or_copied_are_written(rows: DecodeRows) -> None:
    def pages(count: int) -> list[int]:
        return rows.inputs(1).attention.block_table[0, :count].tolist()

    rows.place([work(5, 64, [3, 1])])
    step(rows, 7)
    rows.place([work(7, 65, [3, 1, 6])])
    assert pages(3) == [3, 1, 6]
    step(rows, 7)
    rows.place([work(7, 66, [3, 1, 2], copies=CopyPlan(pages=((6, 2),)))])
    assert pages(3) == [3, 1, 2]


def test_a_row_that_is_left_or_forgotten_is_nobodys(rows: DecodeRows) -> None:
    rows.place([work(5, 64, [3], sequence=1), work(6, 70, [4], sequence=2)])
    rows.place([work(6, 70, [4], sequence=2)])
    assert [row[3] for row in content(rows, 2)] == [12, NO_SLOT]
    rows.forget()
    assert [row[3] for row in content(rows, 2)] == [NO_SLOT, NO_SLOT]
    rows.place([work(6, 70, [4], sequence=2)])
    assert content(rows, 1) == [(6, 70, 70, 12)]


def test_each_row_is_drawn_as_its_request_asks(rows: DecodeRows) -> None:
    warm = Draw(SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1), 7)
    rows.place([work(5, 64, [3], sequence=1), work(6, 70, [4], sequence=2, draw=warm)])
    knobs = rows.knobs(3, ranked=True)
    assert knobs.temperature.tolist() == [0, 0.5, 0]
    assert knobs.top_p.tolist() == [1, 0.5, 1]
    assert knobs.top_k[1] == 3
    assert float(knobs.floor[1].exp()) == pytest.approx(0.1)
