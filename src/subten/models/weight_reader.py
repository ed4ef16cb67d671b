"""A weight of a decoder, put together from the checkpoint's tensors: in the compute type, or in e4m3 with scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from subten.checkpoints.checkpoint import Checkpoint
from subten.checkpoints.fp8 import E4M3, FP8Scales, quantise_channels
from subten.models.weight_tree import Part, Taken, Wanted

Storage = Literal["wide", "channel", "block"]
"""In the compute type; in e4m3 with a scale per output channel, quantised here where need be; or with one per block
of 128 x 128, as the checkpoint has it."""

_BLOCK = 128
_AT_ONCE = 1 << 24
"""Elements that are quantised at a time: 64 MB in float32."""


def stored_experts(checkpoint: Checkpoint, wanted: Iterable[Wanted]) -> FP8Scales | None:
    """How the scales of the experts go, if all of them are stored in e4m3 and in one way; None otherwise."""
    found = {_stored(checkpoint, part, w) for w in wanted if w.role == "experts" for part in w.parts}
    return found.pop() if len(found) == 1 else None


def _stored(checkpoint: Checkpoint, part: Part, weight: Wanted) -> FP8Scales | None:
    scales, rows = checkpoint.fp8_scales(part.name), part.shape[-2]
    if scales == "block" and rows == weight.shape[-2] and rows // weight.halves % _BLOCK and weight.halves > 1:
        return None  # Gate and up lie in one tensor and share a block in the middle.
    return scales


class WeightReader:
    """Takes the parts of a weight one after the other."""

    def __init__(self, wanted: Wanted, storage: Storage, dtype: torch.dtype, device: torch.device) -> None:
        self._storage, self._dtype = storage, dtype
        self._values = torch.empty(wanted.shape, dtype=dtype if storage == "wide" else E4M3, device=device)
        # FP8 is copied as bytes: not every device copies it as numbers.
        flat = self._values.flatten() if storage == "wide" else self._values.view(torch.uint8).flatten()
        self._rest = flat
        self._scales: list[Tensor] = []

    def read(self, part: Part, checkpoint: Checkpoint) -> None:
        """The next part."""
        if self._storage == "wide":
            self._put(checkpoint.load(part.name, self._dtype))
            return
        if self._storage == "block" or checkpoint.fp8_scales(part.name) == "channel":
            codes, scale = checkpoint.load_fp8(part.name)
            self._put(codes.view(torch.uint8))
            self._scales.append(scale.flatten(0, scale.ndim - 2 if self._storage == "block" else -1))
            return
        rows = checkpoint.load(part.name, torch.float32).flatten(0, -2)
        codes, scale = quantise_rows(rows, self._values.device)
        self._put(codes.view(torch.uint8))
        self._scales.append(scale)

    def taken(self) -> Taken:
        """The weight, when all parts are read."""
        assert not len(self._rest), "all parts are read"
        if self._storage == "wide":
            return Taken(self._values)
        scale = torch.cat([scale.to(self._values.device) for scale in self._scales])
        leading = self._values.shape[:-2]
        return Taken(self._values, scale.view(*leading, -1, *scale.shape[1:]))

    def _put(self, values: Tensor) -> None:
        target, self._rest = self._rest[: values.numel()], self._rest[values.numel() :]
        target.copy_(values.flatten())


def quantise_rows(weight: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 of a matrix [out, in], and float32 scales [out], on `device` (by default the matrix's); some rows at a
    time, as the arithmetic is in float32."""
    device = device or weight.device
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=device)
    scales = torch.empty(len(weight), device=device)
    count = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), count):
        some = slice(first, first + count)
        found, scale = quantise_channels(weight[some].to(device))
        codes[some], scales[some] = found.view(torch.uint8), scale[:, 0]
    return codes.view(E4M3), scales
