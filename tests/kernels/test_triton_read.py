from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from subten.kernels.triton_read import read_all


@pytest.mark.parametrize(("blocks", "programs"), [(1, 1), (5, 2), (3, 4)])
def test_every_element_is_read_once(blocks: int, programs: int) -> None:
    x = torch.randint(-(2**31), 2**31, (blocks * 16,), generator=torch.Generator().manual_seed(blocks)).int()
    expected = 0
    for element in x.tolist():
        expected ^= element
    out = torch.zeros(1, dtype=torch.int32)
    read_all(x, out, programs, block=16)
    assert out.item() == expected != 0
