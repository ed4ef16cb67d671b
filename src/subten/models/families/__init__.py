"""The supported model families, as data: how each reads its configuration, and what it calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subten.errors import UnknownArchitectureError
from subten.models.families.config import ConfigReader
from subten.models.families.family import ExpertNames, Family, TensorNames
from subten.models.families.granite_moe import GRANITE_MOE
from subten.models.families.llama import LLAMA
from subten.models.families.mixtral import MIXTRAL
from subten.models.families.olmoe import OLMOE
from subten.models.families.qwen import QWEN2, QWEN3
from subten.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from subten.models.spec import DecoderSpec

__all__ = ["FAMILIES", "ExpertNames", "Family", "TensorNames", "spec_from_config"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE)
}
"""By the `model_type` of config.json."""


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The architecture that a Hugging Face configuration describes.

    UnknownArchitectureError if the architecture, or a feature that the configuration turns on, is not supported;
    CheckpointError if an entry is missing or makes no sense.
    """
    reader = ConfigReader(config)
    return _find(reader).spec(reader)


def _find(config: ConfigReader) -> Family:
    model_type = config.text("model_type", "")
    architectures = config.texts("architectures")
    for family in FAMILIES.values():
        type_fits = not model_type or model_type == family.model_type
        architecture_fits = not architectures or family.architecture in architectures
        if type_fits and architecture_fits and (model_type or architectures):
            return family
    found = ", ".join(architectures) or model_type or "(neither model_type nor architectures is given)"
    supported = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES.values())
    raise UnknownArchitectureError(f"architecture {found} is not supported; supported are {supported}")
