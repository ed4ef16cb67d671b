from __future__ import annotations

import pytest
import torch

from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH, can_overlap, padded, sizes


def test_sizes_of_launches() -> None:
    assert [padded(count) for count in (1, 2, 3, 5, 8, 9, 63)] == [1, 2, 4, 8, 8, 16, 64]
    assert sizes(MOST_TOKENS_OF_A_LAUNCH) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_nothing_overlaps_on_a_cpu() -> None:
    assert not can_overlap(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_launches_overlap_from_sm_90_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlaps: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert can_overlap.__wrapped__(torch.device("cuda", 0)) is overlaps
