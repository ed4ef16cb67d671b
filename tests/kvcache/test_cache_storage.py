from __future__ import annotations

import pytest
import torch

from subten.errors import CacheMemoryError
from subten.formats import CacheGeometry, PageLayout, get_format
from subten.kvcache import CacheStorage, CopyPlan, predicted_bytes
from support.kv import CPU, FORMAT_NAMES

GEOMETRY = CacheGeometry(num_layers=3, num_kv_heads=2, head_dim=64)


def storage_of(name: str = "kv2") -> CacheStorage:
    storage = CacheStorage(PageLayout(get_format(name, 4, 16), 64), GEOMETRY, num_pages=4, num_windows=3, device=CPU)
    storage.pages.copy_(torch.arange(4, dtype=torch.uint8)[:, None])
    storage.windows.copy_(torch.arange(3, dtype=torch.float32).reshape(-1, *[1] * 5))
    return storage


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_exactly_the_predicted_bytes_are_allocated(name: str) -> None:
    storage = storage_of(name)
    allocated = storage.pages.untyped_storage().nbytes() + storage.windows.untyped_storage().nbytes()
    assert allocated == storage.nbytes == predicted_bytes(storage.layout, GEOMETRY, num_pages=4, num_windows=3)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_layers_are_disjoint_views_that_cover_everything(name: str) -> None:
    storage = storage_of(name)
    storage.pages.zero_()
    storage.windows.zero_()
    for index in range(GEOMETRY.num_layers):
        layer = storage.layer(index)
        assert layer.pages.shape == (4, 2, storage.layout.record_bytes)
        assert layer.windows.shape == (3, 2, 2, storage.layout.format.window_size, 64)
        assert layer.windows.dtype == storage.layout.wide_dtype
        assert not layer.pages.any()
        assert not layer.windows.any()
        layer.pages.fill_(index + 1)
        layer.windows.fill_(index + 1)
    assert bool((storage.pages > 0).all())
    assert bool((storage.windows > 0).all())


def test_a_page_of_all_layers_is_one_stretch_of_memory() -> None:
    storage = storage_of()
    assert storage.pages[1].is_contiguous()
    assert storage.pages[1].nbytes == storage.layout.page_bytes(GEOMETRY)


def test_copies_are_made_in_order() -> None:
    storage = storage_of()
    storage.apply(CopyPlan(pages=((1, 2), (2, 3)), windows=((0, 1), (1, 2))))
    assert [int(page[0]) for page in storage.pages] == [0, 1, 1, 1]
    assert [float(window.flatten()[0]) for window in storage.windows] == [0, 0, 0]


def test_plans_add_up_in_order() -> None:
    first, second = CopyPlan(pages=((1, 2),), windows=((0, 1),)), CopyPlan(pages=((2, 3),))
    assert first + second == CopyPlan(pages=((1, 2), (2, 3)), windows=((0, 1),))
    assert CopyPlan() + first == first + CopyPlan() == first


def test_a_copied_page_is_the_same_in_every_byte() -> None:
    storage = storage_of()
    storage.pages[1] = torch.randint(0, 256, storage.pages[1].shape, dtype=torch.uint8)
    storage.apply(CopyPlan(pages=((1, 3),)))
    assert torch.equal(storage.pages[3], storage.pages[1])
    assert not torch.equal(storage.pages[2], storage.pages[1])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_was_saved_comes_back_in_every_byte_elsewhere(name: str) -> None:
    storage = storage_of(name)
    saved = storage.save([3, 1], 2)
    before = storage.pages.clone()
    storage.pages.zero_()
    storage.windows.zero_()
    storage.restore(saved, [0, 2], 1)
    assert torch.equal(storage.pages[[0, 2]], before[[3, 1]])
    assert not storage.pages[[1, 3]].any()
    assert (storage.windows[1] == 2).all()
    assert not storage.windows[[0, 2]].any()
    storage.restore(storage.save([], 1), [], 0)
    assert torch.equal(storage.windows[0], storage.windows[1])


def test_memory_that_can_not_be_had_is_one_clear_sentence() -> None:
    layout = PageLayout(get_format("kv2"), 128)
    with pytest.raises(CacheMemoryError, match=r"a cache of \d+\.\d\d GiB could not be allocated on cpu"):
        CacheStorage(layout, CacheGeometry(1000, 1000, 128), num_pages=10**9, num_windows=1, device=CPU)
