from __future__ import annotations

import pytest
import torch

from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH, can_overlap, in_launches, padded, sizes


def test_sizes_of_launches() -> None:
    assert [padded(count) for count in (1, 2, 3, 5, 8, 9, 63)] == [1, 2, 4, 8, 8, 16, 64]
    assert sizes(MOST_TOKENS_OF_A_LAUNCH) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@pytest.mark.parametrize(("count", "sizes_of_launches"), [(3, [3]), (64, [64]), (65, [64, 1]), (130, [64, 64, 2])])
def test_one_launch_behind_the_other(count: int, sizes_of_launches: list[int]) -> None:
    x, seen = torch.arange(count), []

    def launch(some: slice) -> torch.Tensor:
        seen.append(len(x[some]))
        return x[some] + 1

    assert torch.equal(in_launches(launch, count), x + 1)
    assert seen == sizes_of_launches


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
