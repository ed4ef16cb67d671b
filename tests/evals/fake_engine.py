"""An engine without a model, quick and exactly known."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from subten.engine import CacheUsage, Delta, SamplingParams
from subten.formats import get_format

VOCAB = 11


class FakeEngine:
    """A model whose logits are a table of (token, noise of the format), with a cache of known size."""

    def __init__(self, noise: float = 0.0, chunk: int = 4, bytes_per_token: int = 2) -> None:
        self.kv = get_format("bf16" if noise == 0 else "kv2")
        self._noise, self._chunk, self._bytes_per_token = noise, chunk, bytes_per_token
        self._length = 0
        self.max_context = 1000
        self.calls: list[tuple[list[int], int]] = []
        self.open = 0

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        change = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
        return (table + self._noise * change)[list(token_ids)]

    def score(self, token_ids: Sequence[int], decode_tail: int = 0) -> Iterator[Tensor]:
        self.calls.append((list(token_ids), decode_tail))
        self.open += 1
        prefilled = len(token_ids) - decode_tail
        starts = [*range(0, prefilled, self._chunk), *range(prefilled, len(token_ids))]
        try:
            for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
                self._length = end
                yield self.logits(token_ids[start:end])
        finally:
            self.open -= 1

    def cache_usage(self) -> CacheUsage:
        elements = self._length * 8
        return CacheUsage(self._length, elements, self._length * self._bytes_per_token, 2 * elements)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Generator[Delta, None, None]:
        """Greedy decoding by the table; two tokens at once where there is room for them."""
        assert params.temperature == 0
        assert params.ignore_eos
        self.open += 1
        token, written = prompt[-1], 0
        try:
            while written < params.max_tokens:
                piece = []
                for _ in range(min(2, params.max_tokens - written)):
                    token = int(self.logits([token])[0].argmax())
                    piece.append(token)
                written += len(piece)
                yield Delta("", tuple(piece), "length" if written == params.max_tokens else None)
        finally:
            self.open -= 1
