"""Numbers of tokens that kernels are launched for, where each number would be a launch of its own kind."""

from __future__ import annotations

MOST_TOKENS_OF_A_LAUNCH = 64
"""Of a linear layer or a mixture of experts that is one launch. More go through the products of a library."""
_MULTIPLE = 8


def padded(count: int) -> int:
    """The next of 1, 2, 4, 8, and from there on multiples of 8: a tile of the tensor core has 8 columns."""
    return 1 << (count - 1).bit_length() if count <= _MULTIPLE else -(-count // _MULTIPLE) * _MULTIPLE


def sizes(most: int) -> list[int]:
    """All that `padded` gives for numbers from 1 to `most`."""
    return sorted({padded(count) for count in range(1, most + 1)})
