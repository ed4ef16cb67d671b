"""Chained hashes of token pages: two sequences share a page exactly if all tokens up to its end are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from subten.formats.spec import PAGE_SIZE, KVFormat


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a page from the hash of the page before it and the token ids that it adds."""
    digest = hashlib.sha256(parent)
    digest.update(b"".join(token.to_bytes(8, "little") for token in tokens))
    return digest.digest()


def full_pages(length: int, fmt: KVFormat) -> int:
    """Pages that `length` tokens fill, once all of them are coded; page i ends at position `sinks + 64 * (i + 1)`."""
    return max(0, length - fmt.sinks) // PAGE_SIZE


def chain(namespace: bytes, tokens: Sequence[int], fmt: KVFormat) -> list[bytes]:
    """Hashes of all `full_pages` of `tokens`; the sinks belong to the hash of the first.

    Args:
        namespace: start of the chain; differs between models, formats and rules, whose pages never match.
        tokens: token ids from position 0 on.
        fmt: the KV format.
    """
    hashes: list[bytes] = []
    parent, start = namespace, 0
    for end in range(fmt.sinks + PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        parent = page_hash(parent, tokens[start:end])
        hashes.append(parent)
        start = end
    return hashes
