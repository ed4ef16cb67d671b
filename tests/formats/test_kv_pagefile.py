from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import make_golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.errors import PageFormatError
from subten.formats import PAGE_SIZE, CacheGeometry, PageLayout, get_format
from subten.formats.coding import LayerCoding
from subten.formats.layout import LAYOUT_VERSION
from subten.formats.pagefile import MAGIC, dump_pages, load_pages
from support import quantizers as by_definition
from support.kv import FORMAT_NAMES, encode, reconstruct

GOLDEN: list[dict[str, Any]] = json.loads(make_golden.INDEX.read_text())
golden = pytest.mark.parametrize("entry", GOLDEN, ids=lambda e: str(e["file"]))

LAYOUT, GEOMETRY = PageLayout(get_format("kv2"), 64), CacheGeometry(2, 2, 64)


def random_pages(layout: PageLayout, geometry: CacheGeometry, count: int) -> torch.Tensor:
    shape = (count, layout.page_bytes(geometry))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


PAGES = random_pages(LAYOUT, GEOMETRY, 2)
FILE = dump_pages(PAGES, LAYOUT, GEOMETRY)


# --- files written by an earlier version ---------------------------------------------------------------------


def stored(entry: dict[str, Any]) -> tuple[bytes, PageLayout, CacheGeometry, LayerCoding]:
    layout = PageLayout(get_format(entry["format"]), entry["head_dim"])
    data = (make_golden.FOLDER / entry["file"]).read_bytes()
    return data, layout, CacheGeometry(1, 1, layout.head_dim), make_golden.coding_of(layout)


def test_the_index_lists_every_golden_file() -> None:
    files = {path.name for path in make_golden.FOLDER.glob("*.bin")}
    assert {entry["file"] for entry in GOLDEN} == files - set(make_golden.OLD_VERSIONS.values())
    assert [(entry["format"], entry["head_dim"]) for entry in GOLDEN] == list(make_golden.CASES)


@golden
def test_golden_pages_read_as_they_always_did(entry: dict[str, Any]) -> None:
    data, layout, geometry, coding = stored(entry)
    records = load_pages(data, layout, geometry).unflatten(1, (1, layout.record_bytes))
    for side, read in zip("kv", reconstruct(layout, records, coding, PAGE_SIZE), strict=True):
        probes = [float(read[token, 0, channel]) for token, channel in make_golden.PROBES]
        assert probes == pytest.approx(entry["probes"][side], rel=1e-5, abs=1e-5)
        assert float(read.double().norm()) == pytest.approx(entry["norms"][side], rel=1e-6)


@golden
def test_golden_pages_read_as_the_formulas_say(entry: dict[str, Any]) -> None:
    data, layout, geometry, coding = stored(entry)
    records = load_pages(data, layout, geometry).unflatten(1, (1, layout.record_bytes))
    keys, values = (x[:, 0].double().numpy() for x in make_golden.inputs(entry["salt"], entry["head_dim"]))
    read_keys, read_values = (x[:, 0].double().numpy() for x in reconstruct(layout, records, coding, PAGE_SIZE))
    core, channels = keys.copy(), coding.kept_channels[0].tolist()
    core[:, channels] = 0
    expected, sure = by_definition.coded_page(entry["format"], "key", core)
    assert sure.all()
    expected[:, channels] = keys[:, channels].astype("float16")
    assert read_keys == pytest.approx(expected, abs=1e-4)
    expected, sure = by_definition.coded_page(entry["format"], "value", values)
    assert sure.all()
    assert read_values == pytest.approx(expected, abs=1e-4)


@golden
def test_coding_the_same_tokens_again_gives_the_golden_bytes(entry: dict[str, Any]) -> None:
    data, layout, geometry, coding = stored(entry)
    keys, values = make_golden.inputs(entry["salt"], entry["head_dim"])
    pages = encode(layout, keys, values, coding).flatten(1)
    assert torch.equal(pages, load_pages(data, layout, geometry))
    assert dump_pages(pages, layout, geometry) == data


@pytest.mark.parametrize(("version", "file"), make_golden.OLD_VERSIONS.items())
def test_a_file_of_an_older_version_is_refused_in_one_clear_sentence(version: int, file: str) -> None:
    data = (make_golden.FOLDER / file).read_bytes()
    assert version < LAYOUT_VERSION
    with pytest.raises(PageFormatError) as refused:
        load_pages(data, PageLayout(get_format("kv2"), 64), CacheGeometry(1, 1, 64))
    assert str(refused.value) == (
        f"the page file has version {version} where this cache needs {LAYOUT_VERSION}; "
        "pages can't be moved between versions, formats or geometries"
    )


def test_all_older_versions_are_represented() -> None:
    assert list(make_golden.OLD_VERSIONS) == list(range(1, LAYOUT_VERSION))


# --- round trips and refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_load_inverts_dump(name: str, count: int) -> None:
    layout, geometry = PageLayout(get_format(name), 80), CacheGeometry(2, 3, 80)
    pages = random_pages(layout, geometry, count)
    loaded = load_pages(dump_pages(pages, layout, geometry), layout, geometry)
    assert loaded.shape == pages.shape
    assert torch.equal(loaded, pages)


def test_loaded_pages_are_a_copy_of_their_own() -> None:
    loaded = load_pages(FILE, LAYOUT, GEOMETRY)
    loaded.zero_()
    assert torch.equal(load_pages(FILE, LAYOUT, GEOMETRY), PAGES)


@given(where=st.integers(0, len(FILE) - 1), flip=st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_nothing(where: int, flip: int) -> None:
    damaged = bytearray(FILE)
    damaged[where] ^= flip
    try:
        loaded = load_pages(bytes(damaged), LAYOUT, GEOMETRY)
    except PageFormatError:
        return
    assert torch.equal(loaded, PAGES)


@given(end=st.integers(0, len(FILE) - 1))
def test_a_truncated_file_is_refused(end: int) -> None:
    with pytest.raises(PageFormatError):
        load_pages(FILE[:end], LAYOUT, GEOMETRY)


@given(data=st.binary(max_size=200), keep_magic=st.booleans())
def test_any_other_bytes_are_refused(data: bytes, keep_magic: bool) -> None:
    with pytest.raises(PageFormatError):
        load_pages(MAGIC + data if keep_magic else data, LAYOUT, GEOMETRY)


def with_header(**changes: object) -> bytes:
    start = len(MAGIC) + 4
    end = start + int.from_bytes(FILE[len(MAGIC) : start], "little")
    header = json.dumps({**json.loads(FILE[start:end]), **changes}).encode()
    return MAGIC + len(header).to_bytes(4, "little") + header + FILE[end:]


def test_the_message_says_what_is_wrong() -> None:
    refusals = {
        b"not pages": "no page file; a page file starts with SUBTENPG",
        FILE[:100]: "header is damaged",
        FILE[:-1]: "cut short",
        FILE + b"\0": "cut short",
        FILE[:-1] + bytes([FILE[-1] ^ 1]): "do not match their checksum",
        with_header(version=3): "has version 3 where this cache needs 2",
        with_header(format="kv4"): "has format 'kv4' where this cache needs 'kv2'",
        with_header(sinks=4): "has sinks 4 where this cache needs 64",
        with_header(page_size=32): "has page_size 32 where this cache needs 64",
        with_header(num_layers=3): "has num_layers 3 where this cache needs 2",
        with_header(pages=1): "cut short",
        with_header(pages=-2): "cut short",
        with_header(pages="2"): "cut short",
        with_header(sha256=""): "do not match their checksum",
        MAGIC + (99_999).to_bytes(4, "little") + b"[" * 99_999: "header is damaged",
        MAGIC + (4).to_bytes(4, "little") + b"null": "header is damaged",
    }
    for data, message in refusals.items():
        with pytest.raises(PageFormatError, match=message):
            load_pages(data, LAYOUT, GEOMETRY)


@pytest.mark.parametrize(
    ("layout", "geometry"),
    [
        (PageLayout(get_format("kv4"), 64), GEOMETRY),
        (PageLayout(get_format("kv2", sinks=4), 64), GEOMETRY),
        (PageLayout(replace(get_format("kv2"), key=get_format("kv4").key), 64), GEOMETRY),
        (PageLayout(get_format("kv2"), 128), CacheGeometry(2, 2, 128)),
        (LAYOUT, CacheGeometry(1, 4, 64)),
    ],
    ids=["format", "sinks", "key", "head_dim", "heads"],
)
def test_pages_of_another_cache_are_refused(layout: PageLayout, geometry: CacheGeometry) -> None:
    with pytest.raises(PageFormatError, match="can't be moved between versions, formats or geometries"):
        load_pages(FILE, layout, geometry)


def test_the_recent_window_may_differ() -> None:
    """It decides when a token is coded, not how: the pages are the same."""
    layout = PageLayout(get_format("kv2", recent=32), 64)
    assert torch.equal(load_pages(FILE, layout, GEOMETRY), PAGES)
