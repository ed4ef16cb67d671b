"""What a model file looks like to the rest of the program, whatever its format on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from subten.checkpoints.fp8 import FP8Scales
from subten.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Checkpoint(Protocol):
    """The weights, the configuration and the tokenizer of one model, read from disk on demand.

    Opening reads headers only. `load` reads one tensor, so a model is never held twice.
    """

    @property
    def path(self) -> Path:
        """The folder or file the model was opened from."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The Hugging Face `config.json` as a dict; that of a GGUF file is synthesised from its metadata."""

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over names, shapes, types, sizes and sampled bytes of the stored tensors."""

    def names(self) -> frozenset[str]:
        """Names of the logical tensors, as `save_pretrained` of transformers 5 writes them.

        Quantisation scales are not among them: `load` applies them.
        """

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it. Raises CheckpointError where there is no such tensor."""

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised, contiguous, in main memory, in the floating-point `dtype` asked for.

        Raises CheckpointError where there is no such tensor, where its bytes can't be read, and where it holds
        NaN or infinite values.
        """

    def fp8_scales(self, name: str) -> FP8Scales | None:
        """How the scales of a tensor go that is stored in e4m3 with one scale per output channel, or per block of
        128 x 128; None where it is stored in another way. Raises CheckpointError where there is no such tensor."""

    def load_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor with `fp8_scales` as it is stored, in main memory: e4m3 [..., out, in], and float32 scales,
        [..., out] or [..., blocks of out, blocks of in].

        Raises CheckpointError where its bytes can't be read, and where it holds NaN or infinite values.
        """

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, built from local files only.

        Raises CheckpointError where it is missing or broken, UnknownArchitectureError where its kind is not
        supported.
        """


def require_finite(values: torch.Tensor, name: str, path: Path, dtype: torch.dtype) -> torch.Tensor:
    """`values` as `dtype`; CheckpointError naming the tensor where a value is NaN, infinite or out of range."""
    converted = values.to(dtype)
    if _finite(converted):
        return converted
    if _finite(values):
        raise CheckpointError(
            f"{path}: tensor {name} has values beyond the range of {dtype}; load it as bfloat16 or float32"
        )
    raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values; the file is damaged")


def _finite(values: torch.Tensor) -> bool:
    """In one pass without a second tensor: the least and the largest value are NaN where any is."""
    return not values.numel() or all(math.isfinite(end) for end in torch.stack(torch.aminmax(values)).tolist())
