"""What a format must know of a model before it codes keys and values: measured once on a short text.

Per layer and KV head: the second moments of queries and keys, the mean key, and which uses of them lower the error
of the attention on text that was not used to measure them (moments.py). From these a format derives its kept
channels, its coded space and the metric of its rounding (formats/coding.py).
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

from subten.checkpoints import OWN_PREFIX
from subten.config import home
from subten.engine.loading import LoadedModel
from subten.engine.moments import MeasuredLayer, measure_layer, output_moment
from subten.errors import CalibrationError, StorageError
from subten.formats import KVFormat
from subten.formats.coding import LayerCoding, LayerMoments, calibrated_coding
from subten.kernels.attention import AttentionInputs
from subten.models.decoder import StepInputs

log = logging.getLogger(__name__)

CALIBRATION_FILE = f"{OWN_PREFIX}calibration.safetensors"
CALIBRATION_VERSION = 4
DEFAULT_TOKENS = 1536
FEWEST_TOKENS = 64

_MEASURED: WeakKeyDictionary[LoadedModel, Calibration] = WeakKeyDictionary()


@dataclass(frozen=True)
class Calibration:
    """Statistics of one model's queries and keys; L layers, G KV heads, D = head_dim.

    Attributes:
        query_moment: float16 [L, G, D, D], second moment of the queries that read a KV head, with a mean diagonal
            of 1, averaged over positions.
        key_moment: the same of the keys, without their mean where `mean_key` is not zero.
        pair_energy: float32 [L, G, D / 2], of the keys with their mean.
        mean_key: float32 [L, G, D], mean key before RoPE, in at most `MEAN_PAIRS` rotary pairs of each
            head; zero in layers whose keys are coded as they are.
        shape_keys: bool [L, G], whether the rounding of keys is shaped.
        whiten_keys: bool [L, G], whether keys are whitened before coding.
        fingerprint: of the model they were measured on.
        text_sha256: of the text.
        tokens: how many tokens of it were used.
    """

    query_moment: Tensor
    key_moment: Tensor
    pair_energy: Tensor
    mean_key: Tensor
    shape_keys: Tensor
    whiten_keys: Tensor
    fingerprint: str
    text_sha256: str
    tokens: int

    def coding(self, layer: int, fmt: KVFormat, model: LoadedModel) -> LayerCoding:
        """How a format codes one layer of the model, on the model's device."""
        output = output_moment(model.decoder.weights.layers[layer].attention.o.wide(torch.float32), model.geometry)
        measured = (self.query_moment, self.key_moment, self.pair_energy, self.shape_keys, self.whiten_keys)
        query, key, energy, shape, whiten = (x[layer].to(model.device) for x in measured)
        return calibrated_coding(fmt, LayerMoments(query, key, energy, output, shape, whiten))

    def removed_mean(self, layer: int, fmt: KVFormat) -> Tensor | None:
        """The mean key [G, D] that a format takes out of a layer's keys, if it does."""
        mean = self.mean_key[layer]
        return mean if fmt.key.remove_mean and bool(mean.any()) else None


_TENSORS = ("query_moment", "key_moment", "pair_energy", "mean_key", "shape_keys", "whiten_keys")


def shipped_text() -> str:
    """The calibration text of the package: the Declaration of Independence and the head of the Constitution
    of the United States, both in the public domain."""
    return files("subten.engine").joinpath("calibration_text.txt").read_text(encoding="utf-8")


def calibrate(model: LoadedModel, text: str | None = None, max_tokens: int = DEFAULT_TOKENS) -> Calibration:
    """Measure a model on a text (by default the shipped one).

    Raises:
        CalibrationError: the text gives fewer than 64 tokens.
    """
    text = shipped_text() if text is None else text
    token_ids = model.tokenizer.encode(text)[: min(max_tokens, model.spec.max_positions)]
    if len(token_ids) < FEWEST_TOKENS:
        raise CalibrationError(
            f"the calibration text gives {len(token_ids)} tokens; at least {FEWEST_TOKENS} are needed"
        )
    layers: list[MeasuredLayer] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        output = output_moment(model.decoder.weights.layers[layer].attention.o.wide(torch.float32), model.geometry)
        layers.append(measure_layer(q, k, v, output, model.decoder.rope, model.spec.attention.scale))

    with torch.inference_mode():
        model.decoder.forward(without_cache(token_ids, model.device), None, observe)
    stacked = {name: torch.stack([getattr(layer, name) for layer in layers]).cpu() for name in _TENSORS}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Calibration(**stacked, fingerprint=model.fingerprint, text_sha256=digest, tokens=len(token_ids))


def calibration_for(model: LoadedModel) -> Calibration:
    """The calibration beside the model's weights, or else the one measured on the shipped text: now, if it was
    not before, and kept in subten's own folder for the next start.

    Raises:
        CalibrationError: the file beside the weights is damaged or belongs to another model.
    """
    beside = calibration_path(model)
    if beside.exists():
        return load_calibration(beside, model)
    if model not in _MEASURED:
        _MEASURED[model] = _kept_or_measured(model)
    return _MEASURED[model]


def _kept_or_measured(model: LoadedModel) -> Calibration:
    kept = home() / "calibrations" / f"{model.fingerprint[:32]}.safetensors"
    if kept.exists():
        try:
            return load_calibration(kept, model)
        except CalibrationError as error:
            log.warning("measuring %s again: %s", model.name, error)
    log.info("no calibration beside %s: measuring it on %d tokens", model.name, DEFAULT_TOKENS)
    measured = calibrate(model)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_calibration(measured, kept)
    except (OSError, StorageError) as error:
        log.warning("the calibration of %s can't be kept for the next start: %s", model.name, error)
    return measured


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
        save_file({name: getattr(calibration, name).contiguous() for name in _TENSORS}, staging, metadata)
        staging.replace(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"the calibration can't be written to {path}: {error}") from error
    finally:
        staging.unlink(missing_ok=True)


def load_calibration(path: Path, model: LoadedModel) -> Calibration:
    """Read a calibration file and check that it belongs to the model.

    Raises:
        CalibrationError: it is damaged, of another version, or was measured on another model.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            version, fingerprint = metadata.get("version"), metadata.get("fingerprint")
            current = version == str(CALIBRATION_VERSION)
            tensors = {name: file.get_tensor(name) for name in _TENSORS} if current else {}
            tokens = int(metadata["tokens"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CalibrationError(
            f"{path} is no readable calibration ({error}); delete it or run `subten calibrate` again"
        ) from error
    if not current:
        raise CalibrationError(
            f"{path} has version {json.dumps(version)} where {CALIBRATION_VERSION} is needed; "
            "run `subten calibrate` again"
        )
    if fingerprint != model.fingerprint:
        raise CalibrationError(
            f"{path} was measured on another model than {model.name}; delete it or run `subten calibrate` again"
        )
    _check_shapes(tensors, model, path)
    digest = metadata.get("text_sha256", "")
    return Calibration(**tensors, fingerprint=model.fingerprint, text_sha256=digest, tokens=tokens)


def _check_shapes(tensors: dict[str, Tensor], model: LoadedModel, path: Path) -> None:
    geometry = model.geometry
    heads, size = (geometry.num_layers, geometry.num_kv_heads), geometry.head_dim
    square, vector, pairs = (*heads, size, size), (*heads, size), (*heads, size // 2)
    for name, shape in zip(_TENSORS, (square, square, pairs, vector, heads, heads), strict=True):
        if tuple(tensors[name].shape) != shape:
            raise CalibrationError(
                f"{path} has {name} of shape {tuple(tensors[name].shape)} where {model.name} needs {shape}"
            )
        if not bool(tensors[name].isfinite().all()):
            raise CalibrationError(f"{path} has {name} that is not finite; run `subten calibrate` again")


def calibration_path(model: LoadedModel) -> Path:
    """Where a model's calibration lies: beside its weights."""
    folder = model.path if model.path.is_dir() else model.path.parent
    return folder / CALIBRATION_FILE


def without_cache(token_ids: list[int], device: torch.device) -> StepInputs:
    """One sequence as a whole, for a decoder that is run without a cache."""
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
