"""Trained parameters in a few small files, for channels that limit the size of a file.

Parameters are rounded to bfloat16. Their high bytes (sign and most of the exponent) take few values and are
compressed;
the low bytes are noise and stored as they are: about 10.5 bits a parameter. Files: ``weights.json``, and
``weights.00``, ``weights.01``, ... of at most 15 MiB.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PART_BYTES = 15 * 2**20


def write_weights(state: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> int:
    """Write a state dict and facts about it. Returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    flat = torch.cat([state[n].detach().to("cpu", torch.bfloat16).flatten() for n in names])
    planes = flat.view(torch.uint8).numpy().reshape(-1, 2)
    high = zlib.compress(planes[:, 1].tobytes(), 6)
    blob = high + planes[:, 0].tobytes()
    shapes = {n: list(state[n].shape) for n in names}
    header = {"about": dict(about), "shapes": shapes, "high_bytes": len(high), "parameters": flat.numel()}
    (folder / "weights.json").write_text(json.dumps(header) + "\n")
    for part, start in enumerate(range(0, len(blob), _PART_BYTES)):
        (folder / f"weights.{part:02d}").write_bytes(blob[start : start + _PART_BYTES])
    return len(blob)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict in bfloat16 and the facts that ``write_weights`` was given. Raises ValueError if parts are
    missing."""
    header = json.loads((folder / "weights.json").read_text())
    blob = b"".join(p.read_bytes() for p in sorted(folder.glob("weights.[0-9][0-9]")))
    count, split = header["parameters"], header["high_bytes"]
    if len(blob) != split + count:
        raise ValueError(f"{folder} holds {len(blob)} bytes of weights, and {split + count} are expected")
    planes = np.empty((count, 2), dtype=np.uint8)
    planes[:, 1] = np.frombuffer(zlib.decompress(blob[:split]), dtype=np.uint8)
    planes[:, 0] = np.frombuffer(blob[split:], dtype=np.uint8)
    flat = torch.from_numpy(planes.reshape(-1)).view(torch.bfloat16)
    state = {}
    position = 0
    for name, shape in header["shapes"].items():
        size = int(np.prod(shape))
        state[name] = flat[position : position + size].view(shape)
        position += size
    return state, header["about"]
