"""Load an exported folder into transformers' own implementation, in float32, with FP8 blocks dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from subten.checkpoints.fp8 import dequantise_blocks

_SCALE = "_scale_inv"


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of ``model.safetensors`` in float32, scales folded in."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, safe_open is no mapping
    tensors = {}
    for name, tensor in stored.items():
        if name + _SCALE in stored:
            tensors[name] = dequantise_blocks(tensor, stored[name + _SCALE])
        elif not name.endswith(_SCALE):
            tensors[name] = tensor.float()
    return tensors


def load_folder(folder: Path) -> Any:
    """``Qwen3MoeForCausalLM`` in float32 with the folder's weights. Raises ValueError if names do not match."""
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config", None)
    model, report = Qwen3MoeForCausalLM.from_pretrained(
        None,
        config=Qwen3MoeConfig(**settings),
        state_dict=folder_tensors(folder),
        dtype=torch.float32,
        output_loading_info=True,
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise ValueError(
            f"{folder}: missing {sorted(report['missing_keys'])[:3]}, extra {sorted(report['unexpected_keys'])[:3]}"
        )
    return model.eval()
