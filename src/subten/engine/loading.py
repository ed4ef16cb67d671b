"""From a name or path to a model that can run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from subten.checkpoints import open_checkpoint, resolve_model
from subten.engine.tokenizer import Tokenizer
from subten.errors import ParameterError
from subten.formats import CacheGeometry
from subten.kernels.select import CACHED_ATTENTION, Kernels, select_kernels
from subten.models.decoder import Decoder
from subten.models.families import spec_from_config
from subten.models.spec import DecoderSpec
from subten.models.weights import KeptWeights, load_weights, pack_experts

log = logging.getLogger(__name__)

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_WEIGHTS: dict[str, KeptWeights] = {"16bit": "16bit", "stored": "stored", "fp8": "fp8"}
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory. Several caches, of several formats, may share one."""

    name: str
    path: Path
    spec: DecoderSpec
    decoder: Decoder
    tokenizer: Tokenizer
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    weights: KeptWeights = "16bit"
    """What of its weights is in e4m3."""
    attention: str | None = None
    """The implementation of `cached_attention` that its caches insist on, if any."""

    @property
    def geometry(self) -> CacheGeometry:
        """What the size of its cache depends on."""
        return CacheGeometry(self.spec.num_layers, self.spec.attention.num_kv_heads, self.spec.attention.head_dim)


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: Mapping[str, str] | None = None,
    weights: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load weights and tokenizer, and choose the kernels.

    Args:
        model: a folder, a .gguf file, or the name of a shipped or pulled model.
        dtype: compute type; "auto" is float32 on a CPU and bfloat16 on a GPU.
        device: "auto" takes a GPU where there is one.
        kernels: operation -> implementation, to insist on one; `cached_attention` is chosen with a cache.
        weights: what is kept in FP8 (e4m3). "stored": experts, where the checkpoint stores them so, as they are
            stored. "fp8": experts and the matrices of linear layers; what is not stored so is quantised, with a scale
            per output channel. "16bit": nothing, all is in the compute type. "auto" is "stored" on a GPU that
            multiplies FP8, else "16bit".
        progress: called with (tensors loaded, tensors in all).

    Raises:
        SubtenError: a subclass says what is wrong with the model, the device or the kernels asked for.
    """
    target = choose_device(device)
    compute = choose_dtype(dtype, target)
    path = resolve_model(str(model))
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    kept = choose_weights(weights, target)
    chosen = select_kernels(target, kernels, dtype=compute, experts=spec.expert_sizes)
    # Before the weights: what is wrong with it is known in seconds.
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if not spec.vocab_size // 2 <= (known := len(tokenizer.backend)) <= spec.vocab_size:
        log.warning(
            "the tokenizer of %s knows %d tokens and the model %d; they may not belong together",
            *(path, known, spec.vocab_size),
        )
    loaded = load_weights(checkpoint, spec, dtype=compute, device=target, kept=kept, progress=progress)
    return LoadedModel(
        name=path.stem if path.is_file() else Path(str(model)).name or path.resolve().name,
        path=path,
        spec=spec,
        decoder=Decoder(spec, pack_experts(loaded, chosen.pack_experts), chosen),
        tokenizer=tokenizer,
        fingerprint=checkpoint.fingerprint,
        dtype=compute,
        device=target,
        kernels=chosen,
        weights=kept,
        attention=(kernels or {}).get(CACHED_ATTENTION),
    )


def choose_device(name: str = "auto") -> torch.device:
    """A device by name; "auto" takes a GPU where there is one.

    Raises:
        ParameterError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(f"there is no device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ParameterError(f"device '{name}' is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device 'cuda' was asked for, but torch sees no CUDA GPU; use auto or cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """A compute type by name; "auto" is float32 on a CPU and bfloat16 on a GPU.

    Raises:
        ParameterError: no such type.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ParameterError(f"there is no dtype '{name}'; use auto or one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def choose_weights(name: str, device: torch.device) -> KeptWeights:
    """What is kept in FP8, by name; "auto" is what is stored so, on a GPU that multiplies it.

    Raises:
        ParameterError: no such choice, or one that the device does not allow.
    """
    multiplies = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    if name == "auto":
        return "stored" if multiplies else "16bit"
    if name not in _WEIGHTS:
        raise ParameterError(f"weights is '{name}'; it must be auto or one of {', '.join(_WEIGHTS)}")
    if name != "16bit" and device.type == "cuda" and not multiplies:
        raise ParameterError(f"weights '{name}' need a GPU of compute capability 8.9 or more; use auto or 16bit")
    return _WEIGHTS[name]
