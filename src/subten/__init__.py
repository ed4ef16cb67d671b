"""Sub-10 ms tokens, sub-byte KV: an inference engine for Mixture-of-Experts language models.

    from subten import LLM, SamplingParams
    llm = LLM("smollm2", kv="kv2")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text)

The names below are imported on first use, so that `subten --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from subten.engine import LLM, AsyncEngine, Completion, Delta, SamplingParams, load_model
    from subten.errors import SubtenError
    from subten.formats import FORMATS, KVFormat, get_format

_HOME = {
    "LLM": "subten.engine",
    "AsyncEngine": "subten.engine",
    "Completion": "subten.engine",
    "Delta": "subten.engine",
    "SamplingParams": "subten.engine",
    "load_model": "subten.engine",
    "SubtenError": "subten.errors",
    "FORMATS": "subten.formats",
    "KVFormat": "subten.formats",
    "get_format": "subten.formats",
}

__all__ = [
    "FORMATS",
    "LLM",
    "AsyncEngine",
    "Completion",
    "Delta",
    "KVFormat",
    "SamplingParams",
    "SubtenError",
    "__version__",
    "get_format",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'subten' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
