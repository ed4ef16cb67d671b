"""The figures and drawings of docs/formats are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from subten.formats import DEFAULT_FORMAT, PAGE_SIZE, CacheGeometry, PageLayout, get_format
from subten.formats.layout import LAYOUT_VERSION, PLANE_ALIGNMENT
from subten.formats.packing import pack, slot_of_token
from subten.formats.pagefile import MAGIC
from support.kv import FORMAT_NAMES

DOCS = Path(__file__).parents[2] / "docs" / "formats"
README, LAYOUT = ((DOCS / name).read_text() for name in ("README.md", "page-layout.md"))


def table_below(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the first table whose header begins with `first_cell`, header included and ruler left out."""
    lines = text[text.index(f"| {first_cell} |") :].splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def name_in(cell: str) -> str:
    return cell.split("`")[1]


def test_every_format_stands_in_the_table_with_its_bits_and_windows() -> None:
    header, *rows = table_below(README, "name")
    assert header[3:] == ["head_dim 64", "head_dim 128", "sinks", "recent"]
    assert [name_in(row[0]) for row in rows] == list(FORMAT_NAMES)
    assert [name_in(row[0]) for row in rows if "(default)" in row[0]] == [DEFAULT_FORMAT]
    for row in rows:
        fmt = get_format(name_in(row[0]))
        assert [float(cell) for cell in row[3:5]] == [PageLayout(fmt, d).coded_bits() for d in (64, 128)]
        assert [int(cell) for cell in row[5:]] == [fmt.sinks, fmt.recent]


def test_bits_with_windows_are_those_of_cache_bytes() -> None:
    header, *rows = table_below(README[README.index("windows included") :], "name")
    lengths = [int(cell.removesuffix(" tokens")) for cell in header[1:]]
    geometry = CacheGeometry(1, 1, 128)
    assert len(rows) == 6
    for row in rows:
        layout = PageLayout(get_format(name_in(row[0])), 128)
        bits = [layout.cache_bytes(geometry, length) * 8 / geometry.elements(length) for length in lengths]
        assert row[1:] == [f"{b:.2f}" for b in bits]


def test_the_mixed_name_in_the_text_is_what_it_says() -> None:
    mixed, shipped = get_format("kv4:kv2"), get_format("k4v2")
    assert "`kv4:kv2` is `k4v2`" in README
    assert (mixed.key, mixed.value) == (shipped.key, shipped.value)


RECORDS = re.findall(r"`(\w+)` at head_dim (\d+) \((\d+) bytes, ([\d.]+) bits per element\):", LAYOUT)


@pytest.mark.parametrize(("name", "head_dim", "record_bytes", "bits"), RECORDS)
def test_plane_tables_are_the_layouts(name: str, head_dim: str, record_bytes: str, bits: str) -> None:
    layout = PageLayout(get_format(name), int(head_dim))
    assert (layout.record_bytes, layout.coded_bits()) == (int(record_bytes), float(bits))
    _, *rows = table_below(LAYOUT[LAYOUT.index(f"`{name}` at head_dim {head_dim} (") :], "plane")
    assert [tuple(row) for row in rows] == [
        (
            f"`{plane_name}`",
            str(plane.dtype).removeprefix("torch."),
            " x ".join(map(str, plane.shape)),
            str(plane.offset),
            str(plane.nbytes),
        )
        for plane_name, plane in layout.planes.items()
    ]


def test_four_records_are_drawn_and_every_plane_name_is_explained() -> None:
    assert [record[0] for record in RECORDS] == ["kv2", "kivi2", "int4", "bf16"]
    planes = {plane for name in FORMAT_NAMES for plane in PageLayout(get_format(name), 64).planes}
    assert all(f"`{plane}`" in LAYOUT for plane in planes)
    drawn = next(line for line in LAYOUT.splitlines() if re.match(r" +record +\|", line))
    assert [cell.strip() for cell in drawn.split("|")[1:-1]] == list(PageLayout(get_format("kv2"), 128).planes)
    assert f"multiple of {PLANE_ALIGNMENT} bytes" in LAYOUT


@pytest.mark.parametrize("bits", [2, 4])
def test_the_drawn_word_is_the_packed_word(bits: int) -> None:
    header, channels = table_below(LAYOUT[LAYOUT.index(f"{bits} bits and head_dim 128") :], "bits of word `w`")
    for span, channel in zip(header[1:], channels[1:], strict=True):
        high, low = map(int, span.split("-"))
        assert high - low + 1 == bits
        for word in range(128 * bits // 16):
            codes = torch.zeros(128, dtype=torch.uint8)
            codes[word + int(channel.removeprefix("w + "))] = 2**bits - 1
            stored = pack(codes, bits)
            assert int(stored[word]) & 0xFFFF == ((1 << bits) - 1) << low
            assert int(stored.count_nonzero()) == 1


def test_the_drawn_slots_are_the_codes() -> None:
    _, *rows = table_below(LAYOUT, "slots")
    tokens = [int(cell) for row in rows for cell in row[1:]]
    assert [row[0] for row in rows] == [f"{first}-{first + 7}" for first in range(0, PAGE_SIZE, 8)]
    assert slot_of_token(torch.tensor(tokens)).tolist() == list(range(PAGE_SIZE))


def test_the_page_file_is_described_as_written() -> None:
    assert f"`{MAGIC.decode()}`" in LAYOUT
    assert f"layout version {LAYOUT_VERSION}," in LAYOUT


def test_paths_in_the_docs_exist() -> None:
    root = DOCS.parents[1]
    paths = set(re.findall(r"`((?:src|tests)/[\w./]+)`", README + LAYOUT))
    assert len(paths) >= 6
    assert [path for path in paths if not (root / path).exists()] == []
