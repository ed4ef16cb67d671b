"""The decode kernels by name, each behind the same call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from subten.errors import KernelUnavailableError
from subten.formats import KVFormat
from subten.kernels.attention import AttentionInputs
from subten.kernels.attention.device_cache import PagedLayers

KERNELS = ("triton", "gluon")

Attend = Callable[[Any, PagedLayers, AttentionInputs, float], Tensor]
"""(query, layer, inputs, scale) to [batch, num_heads, head_dim]."""


def is_for(name: str, fmt: KVFormat) -> bool:
    """Whether a kernel is meant for a format at all: the Gluon one is for packed codes of 2 bits."""
    return name != "gluon" or all(side.bits == 2 and side.affine == "packed" for side in (fmt.key, fmt.value))


@dataclass(frozen=True)
class DecodeKernel:
    """One implementation of decode attention.

    Attributes:
        name: as in the registry.
        module: has `attend_decode(query, layer, inputs, scale, plan, scratch)`, and `prepare_decode(query, layer,
            max_pages)`, which makes plan and scratch once for all steps, as a served model does.
    """

    name: str
    module: ModuleType

    @property
    def integer_query(self) -> bool:
        """Whether it takes the coded query as integers."""
        return self.name == "gluon"

    @classmethod
    def load(cls, name: str) -> DecodeKernel:
        """Import it.

        Raises:
            KernelUnavailableError: it can't be imported here.
        """
        try:
            return cls(name, import_module(f"subten.kernels.attention.{name}_decode"))
        except ImportError as error:
            raise KernelUnavailableError(f"the {name} kernel can't be loaded here: {error}") from error

    def planned(self, query: Any, layer: PagedLayers, inputs: AttentionInputs) -> Attend:
        """The kernel for steps of this shape, what it needs besides made beforehand where it can be."""
        plan, scratch = self.module.prepare_decode(query, layer, inputs.block_table.shape[1])

        def attend(query: Any, layer: PagedLayers, inputs: AttentionInputs, scale: float) -> Tensor:
            result: Tensor = self.module.attend_decode(query, layer, inputs, scale, plan, scratch)
            return result

        return attend
