from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.serving import Live, serving

from subten.engine import LLM, LoadedModel, load_model
from support.tiny_model import save_tiny_model

TINY = {"kv": "kv2-plain", "max_context": 600, "max_batch": 4, "sinks": 4, "recent": 8, "chunk_size": 64}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """A random model with one token per byte, in float64: its answers do not depend on company."""
    return load_model(tiny_folder, dtype="float64")


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model("demo-moe")


@pytest.fixture(scope="session")
def tiny_server(tiny: LoadedModel) -> Iterator[Live]:
    with serving(LLM(tiny, **TINY, prefill="window", sessions=8)) as live:
        yield live


@pytest.fixture(scope="session")
def demo_server(demo: LoadedModel) -> Iterator[Live]:
    with serving(LLM(demo, max_context=800, max_batch=4, sessions=8)) as live:
        yield live


@pytest.fixture
def server(tiny_server: Live) -> Iterator[Live]:
    """The tiny model's; whatever a test does to it, nothing of it is left behind."""
    yield tiny_server
    tiny_server.assert_idle()


@pytest.fixture
def demo_live(demo_server: Live) -> Iterator[Live]:
    yield demo_server
    demo_server.assert_idle()
