from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.errors import UnknownFormatError
from subten.formats import PAGE_SIZE, CacheGeometry, PageLayout, TensorFormat, get_format
from support.kv import FORMAT_NAMES, HEAD_DIMS

lengths = st.integers(0, 2000)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_planes_are_aligned_and_neither_overlap_nor_leave_gaps(name: str, head_dim: int) -> None:
    layout = PageLayout(get_format(name), head_dim)
    end = 0
    for plane in layout.planes.values():
        assert plane.offset % 16 == 0
        assert 0 <= plane.offset - end < 16
        end = plane.offset + plane.nbytes
    assert layout.record_bytes % 16 == 0
    assert 0 <= layout.record_bytes - end < 16


def test_kv2_at_head_dim_128_is_the_documented_record() -> None:
    layout = PageLayout(get_format("kv2"), 128)
    assert {name: (p.dtype, p.shape, p.offset) for name, p in layout.planes.items()} == {
        "key_codes": (torch.int16, (64, 16), 0),
        "value_codes": (torch.int16, (16, 64), 2048),
        "key_scale": (torch.int16, (64, 1, 1), 4096),
        "value_scale": (torch.int16, (64, 1, 1), 4224),
        "kept_pair": (torch.float16, (64, 2), 4352),
    }
    assert layout.record_bytes == 4608
    assert layout.coded_bits() == 2.25


def test_what_is_not_calibrated_has_the_same_record() -> None:
    for head_dim in HEAD_DIMS:
        plain, calibrated = (PageLayout(get_format(name), head_dim) for name in ("kv2-plain", "kv2"))
        assert plain.planes == calibrated.planes


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_views_of_planes_cover_their_own_bytes_only(name: str, head_dim: int) -> None:
    layout = PageLayout(get_format(name), head_dim)
    pages = torch.zeros(2, 3, layout.record_bytes, dtype=torch.uint8)
    for plane_name, plane in layout.planes.items():
        view = layout.view(pages, plane_name)
        assert view.shape == (2, 3, *plane.shape)
        assert view.dtype == plane.dtype
        pages[1, 2, plane.offset : plane.offset + plane.nbytes] = 0x3C
        filled = view.contiguous().view(torch.uint8)
        assert bool((filled[1, 2] == 0x3C).all())
        assert int(filled.count_nonzero()) == plane.nbytes
        pages.zero_()


def tensor_record_bits(fmt: TensorFormat, head_dim: int) -> int:
    """Bits that keys, or values, of 64 tokens of one head take; added up element by element."""
    bits = PAGE_SIZE * head_dim * fmt.bits
    if fmt.coded:
        one_scale = 32 if fmt.offset and fmt.affine == "fp16" else 16
        if fmt.axis == "channel":
            bits += head_dim * one_scale
        else:
            groups = len(range(0, head_dim, fmt.group or head_dim))
            bits += PAGE_SIZE * groups * one_scale
    bits += PAGE_SIZE * fmt.kept_pairs * 2 * 16
    if fmt.kept_fraction:
        bits += PAGE_SIZE * head_dim * 16
    return bits


@given(
    name=st.sampled_from(FORMAT_NAMES),
    head_dim=st.sampled_from(HEAD_DIMS),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    batch=st.integers(1, 8),
    length=lengths,
    sinks=st.integers(0, 70),
    recent=st.integers(0, 140),
)
def test_cache_bytes_are_the_sum_of_their_parts(
    name: str, head_dim: int, layers: int, heads: int, batch: int, length: int, sinks: int, recent: int
) -> None:
    fmt = get_format(name, sinks, recent)
    layout, geometry = PageLayout(fmt, head_dim), CacheGeometry(layers, heads, head_dim)
    one_page = (tensor_record_bits(fmt.key, head_dim) + tensor_record_bits(fmt.value, head_dim)) // 8
    coded = 0
    for position in range(fmt.sinks, length - fmt.recent):
        whole_page_follows = (position - fmt.sinks) // 64 * 64 + 64 <= length - fmt.recent - fmt.sinks
        coded += 1 if name not in ("kivi2", "article2") or whole_page_follows else 0
    pages = len({position // PAGE_SIZE for position in range(coded)})
    incomplete_page = 63 if name in ("kivi2", "article2") else 0
    window = (fmt.sinks + fmt.recent + incomplete_page) * head_dim * 2 * (4 if name == "fp32" else 2)
    assert layout.cache_bytes(geometry, length, batch) == batch * layers * heads * (pages * one_page + window)
    assert geometry.elements(length) == 2 * layers * heads * head_dim * length


@pytest.mark.parametrize("head_dim", [-64, 0, 8, 20, 72, 100, 127])
def test_head_dims_that_can_not_be_paged_are_refused(head_dim: int) -> None:
    with pytest.raises(UnknownFormatError, match=rf"head_dim {head_dim} .* multiple of 16"):
        PageLayout(get_format("kv2"), head_dim)


def test_windows_are_16_bit_except_for_the_float32_format() -> None:
    widths = {name: PageLayout(get_format(name), 64).wide_dtype for name in FORMAT_NAMES}
    assert widths.pop("fp32") == torch.float32
    assert set(widths.values()) == {torch.bfloat16}
