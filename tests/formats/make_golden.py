"""Write the golden page files: what this version of the formats stores, for every later one to read.

    PYTHONPATH=tests python tests/formats/make_golden.py

Run it only when the page layout changes on purpose, together with a new `LAYOUT_VERSION`; keep a file of the old
version beside the new ones, under a name that says so.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from subten.formats import PAGE_SIZE, CacheGeometry, PageLayout, get_format
from subten.formats.coding import LayerCoding, uncalibrated_coding
from subten.formats.pagefile import dump_pages
from support import quantizers as by_definition
from support.kv import encode, reconstruct

FOLDER = Path(__file__).parent / "golden"
INDEX = FOLDER / "index.json"
CASES = (("kv2", 64), ("kv2", 128), ("kv4", 64), ("int4", 64), ("fp8", 64), ("kivi2", 64))
OLD_VERSIONS = {1: "version-1-kv2-64.bin"}
"""Files that must be refused."""
PROBES = tuple((token * 29 % PAGE_SIZE, 7 * token) for token in range(8))
"""(token, channel) of the reconstructed elements that the index records."""


def inputs(salt: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [64, 1, head_dim]: close to Gaussian, from integers alone, exact in float32."""
    shape = (2, PAGE_SIZE, 1, head_dim)
    index = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) + np.uint64(salt << 32)
    mixed = index * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    slices = sum((mixed >> np.uint64(16 * part)).astype(np.int64) & 0xFFFF for part in range(4))
    keys, values = torch.from_numpy((slices - 0x1FFFE) / 2**15).float()
    keys[:, 0, kept_channels(head_dim)[0]] += 12
    return keys, values


def kept_channels(head_dim: int) -> Tensor:
    return torch.tensor([[5, 5 + head_dim // 2]])


def coding_of(layout: PageLayout) -> LayerCoding:
    """Coding by the format alone: it is made of a few signs, the same on every machine."""
    kept = kept_channels(layout.head_dim) if layout.format.key.kept_pairs else kept_channels(layout.head_dim)[:, :0]
    return uncalibrated_coding(layout.format, layout.head_dim, kept)


def clear_cut(name: str, keys: Tensor, values: Tensor) -> bool:
    """Whether no rounding hangs by a float32 error, so that every machine stores the same bytes."""
    core = keys.clone()
    if get_format(name).key.kept_pairs:
        core[:, 0, kept_channels(keys.shape[-1])[0]] = 0
    pages = (("key", core), ("value", values))
    return all(by_definition.coded_page(name, side, page[:, 0].double().numpy())[1].all() for side, page in pages)


def make(name: str, head_dim: int) -> dict[str, object]:
    """Write one file; return its entry in the index."""
    layout, geometry = PageLayout(get_format(name), head_dim), CacheGeometry(1, 1, head_dim)
    coding = coding_of(layout)
    salt = next(salt for salt in itertools.count() if clear_cut(name, *inputs(salt, head_dim)))
    records = encode(layout, *inputs(salt, head_dim), coding)
    file = f"{name}-{head_dim}.bin"
    (FOLDER / file).write_bytes(dump_pages(records.flatten(1), layout, geometry))
    read = reconstruct(layout, records, coding, PAGE_SIZE)
    by_side = dict(zip("kv", read, strict=True))
    return {
        "format": name,
        "head_dim": head_dim,
        "salt": salt,
        "file": file,
        "probes": {side: [float(x[token, 0, channel]) for token, channel in PROBES] for side, x in by_side.items()},
        "norms": {side: float(x.double().norm()) for side, x in by_side.items()},
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    INDEX.write_text(json.dumps([make(name, head_dim) for name, head_dim in CASES], indent=1) + "\n")
