"""A GGUF file as a `Checkpoint`: Hugging Face names, order and config, dequantised tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from subten.checkpoints.gguf_architectures import find_architecture
from subten.checkpoints.gguf_config import config_from_gguf
from subten.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from subten.checkpoints.gguf_tensors import LogicalTensor, load_logical, logical_tensors
from subten.checkpoints.stored import fingerprint
from subten.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GGUFFile:
    """The `Checkpoint` of a GGUF file. Made by `open_gguf_file`."""

    path: Path
    config: Mapping[str, Any]
    header: GGUFHeader = field(repr=False)
    tensors: Mapping[str, LogicalTensor] = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """See `Checkpoint.fingerprint`."""
        return fingerprint(self.header.tensors.values())

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._tensor(name).shape

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See `Checkpoint.load`."""
        return load_logical(self._tensor(name), name, dtype)

    def fp8_scales(self, name: str) -> None:
        """See `Checkpoint.fp8_scales`: GGUF has no such tensors."""
        self._tensor(name)

    def load_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Checkpoint.load_fp8`."""
        raise CheckpointError(f"{self.path} holds no tensor {name} in FP8")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `Checkpoint.tokenizer`."""
        from subten.checkpoints.gguf_tokenizer import tokenizer_from_gguf  # imports transformers: two seconds

        return tokenizer_from_gguf(self.path, self.header.metadata, self.config["vocab_size"])

    def _tensor(self, name: str) -> LogicalTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} holds no tensor {name}") from None


def open_gguf_file(path: Path) -> GGUFFile:
    """Open a GGUF file; reads its header only.

    Raises CheckpointError where it is damaged or contradicts itself, UnknownArchitectureError where its
    architecture or a feature of it is not supported.
    """
    header = read_gguf_header(path)
    architecture = find_architecture(header.metadata)
    config = config_from_gguf(path, header, architecture)
    tensors = logical_tensors(
        path,
        header.tensors,
        architecture,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        num_experts=config[architecture.expert_count] if architecture.expert_count else None,
    )
    return GGUFFile(path, config, header, tensors)
