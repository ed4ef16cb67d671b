"""How kernels are launched: for which numbers of tokens, where each number would be a launch of its own kind, and
whether one behind the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

MOST_TOKENS_OF_A_LAUNCH = 64
"""Of a linear layer or a mixture of experts that is one launch. More go through the products of a library."""
_MULTIPLE = 8


def padded(count: int) -> int:
    """The next of 1, 2, 4, 8, and from there on multiples of 8: a tile of the tensor core has 8 columns."""
    return 1 << (count - 1).bit_length() if count <= _MULTIPLE else -(-count // _MULTIPLE) * _MULTIPLE


def sizes(most: int) -> list[int]:
    """All that `padded` gives for numbers from 1 to `most`."""
    return sorted({padded(count) for count in range(1, most + 1)})


def in_launches(launch: Callable[[slice], Tensor], tokens: int) -> Tensor:
    """One launch behind the other, each of which returns the rows of its tokens."""
    starts = range(0, tokens, MOST_TOKENS_OF_A_LAUNCH)
    parts = [launch(slice(start, start + MOST_TOKENS_OF_A_LAUNCH)) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch may begin there while the one before it runs: programmatic dependent launch, from sm_90 on.

    A kernel that is launched so waits before it reads what the kernel before has written. All kernels of a step wait
    before they let the next one begin, so that everything older than the kernel before can be read at once.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
