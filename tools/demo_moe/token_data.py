"""Token files on the device: the training mix as a function of the step, and bits per byte of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MIX = {"prose": 0.40, "prose-spaced": 0.25, "guide": 0.25, "reference": 0.04, "code": 0.06}
"""Share of each category in a batch. With ``sampled`` text at hand, see ``mix_with_samples``."""


def mix_with_samples(share: float) -> dict[str, float]:
    """``MIX`` with ``share`` given to text sampled from a teacher, half of it with the spacing of tokenised
    corpora."""
    mix = {name: (1 - share) * value for name, value in MIX.items()}
    return {**mix, "sampled": share / 2, "sampled-spaced": share / 2}


def read_tokens(path: Path) -> Tensor:
    """A ``.u16`` file as int16 (ids are below 32768)."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16))


class TokenMix:
    """Batches of windows from several token streams, in fixed shares.

    The batch of a step depends on the seed and the step alone, so training resumes without a state. Each stream is
    read
    window by window in a random order, every window once before any comes again, and the windows start at another
    offset in each round.

    Args:
        streams: name -> int16 [tokens], on the device that trains.
        shares: name -> share of the sequences; they are normalised.
        context: a window has context + 1 tokens.
        batch: windows per step.
        seed: of the order.
    """

    def __init__(
        self, streams: Mapping[str, Tensor], shares: Mapping[str, float], context: int, batch: int, seed: int
    ) -> None:
        total = sum(shares.values())
        self._names = list(shares)
        self._streams = streams
        self._bounds = np.cumsum([shares[n] / total for n in self._names])
        self._context, self._batch, self._seed = context, batch, seed
        self._orders: dict[tuple[str, int], Tensor] = {}
        device = next(iter(streams.values())).device
        self._window = torch.arange(context + 1, device=device)

    def batch(self, step: int) -> Tensor:
        """int64 [batch, context + 1], the sequences of a step."""
        before, after = self._taken(step), self._taken(step + 1)
        rows = [
            self._rows(name, int(a), int(b)) for name, a, b in zip(self._names, before, after, strict=True) if b > a
        ]
        return torch.cat(rows)

    def rounds(self, step: int) -> dict[str, float]:
        """How often each stream has been read through before ``step``."""
        return {n: float(t) / self._windows(n) for n, t in zip(self._names, self._taken(step), strict=True)}

    def _taken(self, step: int) -> np.ndarray:
        return np.diff(np.round(self._bounds * self._batch * step), prepend=0).astype(np.int64)

    def _windows(self, name: str) -> int:
        windows = (self._streams[name].numel() - self._context - 1) // self._context
        if windows < 1:
            raise ValueError(
                f"{name} has {self._streams[name].numel()} tokens, fewer than two windows of {self._context}"
            )
        return windows

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        stream, windows = self._streams[name], self._windows(name)
        starts = torch.stack([self._order(name, i // windows)[i % windows] for i in range(begin, end)])
        return stream[starts.to(stream.device)[:, None] + self._window].long()

    def _order(self, name: str, round_: int) -> Tensor:
        key = (name, round_)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != name or k[1] == round_ - 1}
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + round_ * 101 + self._names.index(name))
            offset = int(torch.randint(self._context, (1,), generator=generator))
            order = torch.randperm(self._windows(name), generator=generator) * self._context + offset
            self._orders[key] = order
        return self._orders[key]


def bits_per_byte(
    token_losses: Callable[[Tensor], Tensor],
    ids: Tensor,
    num_bytes: int,
    *,
    context: int,
    stride: int,
    first: int,
    batch: int = 32,
) -> float:
    """Mean bits that a byte of a text costs, every token scored once.

    Windows of ``context`` tokens advance by ``stride``; of each only the tokens that no earlier window scored
    count, so a token has at least ``context - stride`` tokens before it (the first window aside).

    Args:
        token_losses: int64 [n, length + 1] -> float32 [n, length], nats.
        ids: integer [tokens] of the whole text.
        num_bytes: of the text in UTF-8.
        context: tokens of a window.
        stride: tokens that a window adds.
        first: the token put before the text, which is not scored.
        batch: windows per call.
    """
    text = torch.cat((torch.tensor([first], device=ids.device), ids.long()))
    length = min(context, text.numel() - 1)
    starts = list(range(0, max(1, text.numel() - length), stride))
    if starts[-1] + length + 1 < text.numel():
        starts.append(text.numel() - length - 1)
    window = torch.arange(length + 1, device=ids.device)
    nats = 0.0
    scored = 0
    for i in range(0, len(starts), batch):
        chosen = starts[i : i + batch]
        losses = token_losses(text[torch.tensor(chosen, device=ids.device)[:, None] + window]).double()
        for row, start in zip(losses, chosen, strict=True):
            nats += float(row[scored - start :].sum())
            scored = start + length
    return nats / math.log(2) / num_bytes
