"""Pages outside the process: a header that says what the bytes are, then the bytes.

The header is checked field by field before a byte is believed; a page of another version or layout is refused
with a sentence, never reinterpreted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subten.errors import PageFormatError
from subten.formats.layout import LAYOUT_VERSION, PageLayout
from subten.formats.spec import PAGE_SIZE, CacheGeometry

MAGIC = b"SUBTENPG"
_LENGTH_BYTES = 4


def dump_pages(pages: Tensor, layout: PageLayout, geometry: CacheGeometry) -> bytes:
    """Serialise pages.

    Args:
        pages: uint8 [n, page_bytes].
        layout: their layout.
        geometry: the model's cache geometry.
    """
    payload = pages.contiguous().cpu().numpy().tobytes()
    header = {
        **_description(layout, geometry),
        "pages": pages.shape[0],
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    encoded = json.dumps(header, sort_keys=True).encode()
    return MAGIC + len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + payload


def load_pages(data: bytes, layout: PageLayout, geometry: CacheGeometry) -> Tensor:
    """Inverse of `dump_pages`.

    Returns:
        uint8 [n, page_bytes], a copy.

    Raises:
        PageFormatError: not a page file, another version or layout than the one asked for, or damaged bytes.
    """
    start = len(MAGIC) + _LENGTH_BYTES
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise PageFormatError("these bytes are no page file; a page file starts with SUBTENPG")
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    try:
        header: Any = json.loads(data[start:end])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise PageFormatError("the page file's header is damaged; write the pages again")
    for field, expected in _description(layout, geometry).items():
        if header.get(field) != expected:
            raise PageFormatError(
                f"the page file has {field} {header.get(field)!r} where this cache needs {expected!r}; "
                "pages can't be moved between versions, formats or geometries"
            )
    payload = data[end:]
    count, page_bytes = header.get("pages"), layout.page_bytes(geometry)
    if not isinstance(count, int) or len(payload) != count * page_bytes:
        raise PageFormatError(f"the page file is cut short: {len(payload)} bytes of {count} pages of {page_bytes}")
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise PageFormatError("the page file's bytes do not match their checksum; write the pages again")
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).reshape(count, page_bytes).copy())


def _description(layout: PageLayout, geometry: CacheGeometry) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(
        json.dumps(
            {
                "version": LAYOUT_VERSION,
                "format": layout.format.name,
                "key": asdict(layout.format.key),
                "value": asdict(layout.format.value),
                "sinks": layout.format.sinks,
                "page_size": PAGE_SIZE,
                **asdict(geometry),
                "planes": {n: [str(p.dtype), *p.shape, p.offset] for n, p in layout.planes.items()},
            }
        )
    )
    return described
