"""What a format must know of a model before it codes a key: which key channels to keep in 16 bit.

A few hundred tokens of text are run through the model without a cache. The energy of each rotary pair of the
keys says where the outliers are: they sit in the same few channels at every token, so one static pair per layer
and KV head catches them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subten.engine.loading import LoadedModel
from subten.errors import CalibrationError, StorageError
from subten.formats import KVFormat
from subten.kernels.attention import AttentionInputs
from subten.models.decoder import StepInputs

log = logging.getLogger(__name__)

CALIBRATION_FILE = "subten-calibration.safetensors"
CALIBRATION_VERSION = 1
DEFAULT_TOKENS = 512

_MEASURED: WeakKeyDictionary[LoadedModel, Calibration] = WeakKeyDictionary()


@dataclass(frozen=True)
class Calibration:
    """Statistics of one model's keys.

    Attributes:
        key_pair_energy: float32 [num_layers, num_kv_heads, head_dim / 2], mean squared length of rotary pair
            (c, c + head_dim / 2) over the tokens. RoPE rotates within a pair and leaves it unchanged.
        fingerprint: of the model they were measured on.
        text_sha256: of the text.
        tokens: how many tokens of it were used.
    """

    key_pair_energy: Tensor
    fingerprint: str
    text_sha256: str
    tokens: int

    def kept_channels(self, fmt: KVFormat) -> Tensor:
        """Channels that the format keeps in 16 bit, int64 [num_layers, num_kv_heads, 2 * kept_pairs]."""
        half = self.key_pair_energy.shape[-1]
        pairs = self.key_pair_energy.topk(fmt.key.kept_pairs, dim=-1).indices
        return torch.cat([pairs, pairs + half], dim=-1)


def shipped_text() -> str:
    """The calibration text of the package: the Declaration of Independence and the head of the Constitution
    of the United States, both in the public domain."""
    return files("subten.engine").joinpath("calibration_text.txt").read_text(encoding="utf-8")


def calibrate(model: LoadedModel, text: str | None = None, max_tokens: int = DEFAULT_TOKENS) -> Calibration:
    """Measure a model on a text (by default the shipped one).

    Raises:
        CalibrationError: the text gives fewer than 16 tokens.
    """
    text = shipped_text() if text is None else text
    token_ids = model.tokenizer.encode(text)[: min(max_tokens, model.spec.max_positions)]
    if len(token_ids) < 16:
        raise CalibrationError(f"the calibration text gives {len(token_ids)} tokens; at least 16 are needed")
    geometry = model.geometry
    energy = torch.zeros(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)

    def observe(layer: int, _q: Tensor, k: Tensor, _v: Tensor) -> None:
        halves = k.float().square().mean(0).view(geometry.num_kv_heads, 2, -1)
        energy[layer] = halves.sum(1).cpu()

    model.decoder.forward(_without_cache(token_ids, model.device), None, observe)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Calibration(energy, model.fingerprint, digest, len(token_ids))


def calibration_for(model: LoadedModel) -> Calibration:
    """The calibration beside the model's weights, or else one measured now and remembered with the model.

    Raises:
        CalibrationError: the file beside the weights is damaged or belongs to another model.
    """
    path = calibration_path(model)
    if path.exists():
        return load_calibration(path, model)
    if model not in _MEASURED:
        log.info("no calibration beside %s: measuring its keys on %d tokens", model.name, DEFAULT_TOKENS)
        _MEASURED[model] = calibrate(model)
    return _MEASURED[model]


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration file, whole or not at all.

    Raises:
        StorageError: the file can't be written.
    """
    metadata = {
        "version": str(CALIBRATION_VERSION),
        "fingerprint": calibration.fingerprint,
        "text_sha256": calibration.text_sha256,
        "tokens": str(calibration.tokens),
    }
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({"key_pair_energy": calibration.key_pair_energy.contiguous()}, staging, metadata)
        staging.replace(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"the calibration can't be written to {path}: {error}") from error


def load_calibration(path: Path, model: LoadedModel) -> Calibration:
    """Read a calibration file and check that it belongs to the model.

    Raises:
        CalibrationError: it is damaged, of another version, or was measured on another model.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            energy = file.get_tensor("key_pair_energy")
            tokens = int(metadata["tokens"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CalibrationError(
            f"{path} is no readable calibration ({error}); delete it or run `subten calibrate` again"
        ) from error
    if metadata.get("version") != str(CALIBRATION_VERSION):
        raise CalibrationError(
            f"{path} has version {json.dumps(metadata.get('version'))} where {CALIBRATION_VERSION} is needed; "
            "run `subten calibrate` again"
        )
    if metadata.get("fingerprint") != model.fingerprint:
        raise CalibrationError(
            f"{path} was measured on another model than {model.name}; delete it or run `subten calibrate` again"
        )
    geometry = model.geometry
    expected = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)
    if tuple(energy.shape) != expected:
        raise CalibrationError(f"{path} has shape {tuple(energy.shape)} where {model.name} needs {expected}")
    return Calibration(energy, model.fingerprint, metadata.get("text_sha256", ""), tokens)


def calibration_path(model: LoadedModel) -> Path:
    """Where a model's calibration lies: beside its weights."""
    folder = model.path if model.path.is_dir() else model.path.parent
    return folder / CALIBRATION_FILE


def _without_cache(token_ids: list[int], device: torch.device) -> StepInputs:
    count = len(token_ids)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    return StepInputs(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.arange(count, device=device),
        attention=AttentionInputs(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_len=none,
            block_table=none[:, None],
            window_slot=none,
        ),
    )
