"""The canary: refuses a format that diverges, names layers, passes one that does not, and says when it can't look."""

from __future__ import annotations

import re

import pytest
from tests.support.tiny_model import save_tiny_model

from subten import LLM
from subten.engine.canary import check_quality
from subten.engine.loading import LoadedModel, load_model
from subten.errors import QualityError
from subten.formats import get_format


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("canary")))


def test_a_format_within_the_limit_passes_and_the_figures_are_told(model: LoadedModel) -> None:
    result = check_quality(model, get_format("kv4", 4, 8), 128, 10.0)
    assert result is not None
    assert result.tokens > 64
    assert 0 < result.kld < 10.0


def test_a_coarser_format_diverges_more(model: LoadedModel) -> None:
    found = [check_quality(model, get_format(name, 4, 8), 128, 100.0) for name in ("kv4", "article2")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].kld < found[1].kld


def test_beyond_the_limit_the_engine_refuses_and_names_layers(model: LoadedModel) -> None:
    with pytest.raises(QualityError) as caught:
        LLM(model, kv=get_format("kv2", 4, 8), max_context=128, max_kld=1e-9)
    message = str(caught.value)
    assert "kv2 diverges from 16 bit by" in message
    named = [int(index) for index in re.findall(r"(\d+) \(\d\.\d+\)", message)]
    assert len(named) == len(set(named)) == min(3, model.spec.num_layers)
    assert all(index < model.spec.num_layers for index in named)


def test_nothing_coded_is_nothing_to_compare(model: LoadedModel) -> None:
    assert check_quality(model, get_format("bf16"), 128, 0.0) is None
    assert check_quality(model, get_format("kv2"), 100, 0.0) is None
