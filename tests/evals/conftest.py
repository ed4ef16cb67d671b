from __future__ import annotations

import pytest

from subten.engine import LoadedModel, load_model
from support.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("tiny")))
