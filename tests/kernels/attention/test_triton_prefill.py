from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from subten.formats import PageLayout, get_format
from subten.kernels.attention import AttentionInputs
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.triton_append import WideBatch, append_chunk
from subten.kernels.attention.triton_encode import Tile
from subten.kernels.attention.triton_prefill import attend_prefill
from support.attention import History, Paged, calibrated, history, plain
from support.device_code import quicken_interpreter
from support.kv import POISON

FORMATS = ("bf16", "fp8", "kv4", "kv2", "k4v2", "kv2-plain")
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per token; and new memory holds NaN."""
    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(Tile, "of", lambda count, padded: Tile(64, 1))
    torch.utils.deterministic.fill_uninitialized_memory = True
    monkeypatch.setattr(torch, "empty_like", lambda x, **how: poisoned(x.shape, x.dtype))
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *shape, dtype=None: poisoned(shape, dtype or x.dtype))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return torch.full((*size, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)[..., 0]


class OnDevice(Paged):
    """The runner of the tests with `append_chunk`: its pages have room for what is coded ahead."""

    def __init__(self, layout: PageLayout, kv_heads: int, lengths: Sequence[int], rule="window", calibrate=calibrated):
        super().__init__(layout, kv_heads, [n + 1 for n in lengths], rule=rule, calibrate=calibrate)
        self.layer = PagedLayers.of([self.cache])

    def chunk(self, chunks: dict[int, History]) -> tuple[Tensor, WideBatch, AttentionInputs]:
        inputs = self.inputs({row: part.length for row, part in chunks.items()})
        q, k, v = (torch.cat([getattr(part, x) for part in chunks.values()]) for x in "qkv")
        wide = append_chunk(k, v, self.layer, inputs)
        for row, part in chunks.items():
            self.held[row] += part.length
        return q, wide, inputs


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest of any head of any query, as a share of what the largest such head has."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm(dim=-1).max()
    return float(error / expected.double().norm(dim=-1).max())


