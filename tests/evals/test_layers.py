from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.models.tiny_models import ragged_inputs
from torch import Tensor

from subten.engine import LLM, CacheUsage, LoadedModel, load_model
from subten.engine.calibrate import calibration_for
from subten.engine.mixed_cache import MixedCacheScorer
from subten.errors import ContextLengthError, ParameterError
from subten.evals.layers import measure_layers
from subten.evals.layers_report import layer_shares, layers_json, layers_table
from subten.evals.plot import layers_plot
from subten.evals.quality import FormatQuality, WindowResult, cut_windows, measure
from subten.evals.report import Run
from subten.formats import KVFormat, PageLayout, get_format
from subten.kernels.attention import MeanKey
from subten.models import Decoder
from support.attention import Calibration, History, attention_by_definition, plain

RUN = Run(
    model="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    text_sha256="0" * 64,
    context=150,
    tokens=300,
    decode_tail=0,
    prefill="window",
    chunk_size=256,
)
TEXT = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
WINDOWS = cut_windows(TEXT, 150, 300)


def small(name: str) -> KVFormat:
    return get_format(name, sinks=4, recent=8)


@pytest.mark.parametrize(("kv", "chunk"), [("kv2", 150), ("kv2", 37), ("kivi2", 37), ("int4", 37), ("fp8", 37)])
def test_all_layers_are_the_serving_path_and_none_is_16_bit(tiny_model: LoadedModel, kv: str, chunk: int) -> None:
    for layers, fmt in (((0, 1), small(kv)), ((), get_format("bf16"))):
        llm = LLM(tiny_model, kv=fmt, max_context=150, max_batch=1, prefill="window", chunk_size=chunk)
        mixed = MixedCacheScorer(tiny_model, small(kv), layers, 150, chunk)
        for window in WINDOWS:
            for tail in (0, 20):
                expected, scores = (torch.cat(list(engine.score(window, tail))) for engine in (llm, mixed))
                assert torch.equal(scores, expected)
        assert mixed.cache_usage() == llm.cache_usage()


@pytest.mark.parametrize("layers", [(0,), (1,)])
def test_only_the_layers_that_were_chosen_are_read_through_codes(
    tiny_model: LoadedModel, layers: tuple[int, ...]
) -> None:
    """Against attention from its definition in float64, each layer with a format of its own."""
    model = load_model(tiny_model.path, dtype="float64")
    fmt, wide = small("kv2"), get_format("bf16")
    calls = iter(range(2))

    def by_definition(q: Tensor, k: Tensor, v: Tensor, _query_start: Tensor, scale: float) -> Tensor:
        layer = next(calls)
        layout = PageLayout(fmt if layer in layers else wide, model.geometry.head_dim)
        past = History(q, k.bfloat16().double(), v.bfloat16().double())
        calibration = plain(layout, k.shape[1])
        if layer in layers:
            measured = calibration_for(model)
            mean = measured.removed_mean(layer, fmt)
            mean_key = None if mean is None else MeanKey(mean, model.decoder.rope)
            calibration = Calibration(measured.coding(layer, fmt, model), mean_key)
        return attention_by_definition(past, [len(q)], layout, calibration, "window", scale)

    tokens = WINDOWS[0]
    decoder = Decoder(model.spec, model.decoder.weights, replace(model.kernels, dense_attention=by_definition))
    hidden = decoder.forward(ragged_inputs([torch.tensor(tokens)]), None)
    scores = torch.cat(list(MixedCacheScorer(model, fmt, layers, 150, 64).score(tokens)))
    torch.testing.assert_close(scores, decoder.logits(hidden), rtol=1e-5, atol=1e-5)


def test_each_layer_is_measured_alone_and_then_all(tiny_model: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    first, second, both = measure_layers(
        tiny_model, small("kv2"), WINDOWS, lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (4 * 300, 4 * 300)
    assert min(first.kld.value, second.kld.value) > 0
    assert both.kld.value > max(first.kld.value, second.kld.value)
    llm = {
        kv: LLM(tiny_model, kv=fmt, max_context=150, max_batch=1, prefill="window")
        for kv, fmt in (("kv2", small("kv2")), ("bf16", get_format("bf16")))
    }
    (expected,) = measure(llm["bf16"], [llm["kv2"]], WINDOWS, 0)
    assert both == expected
    # A layer of codes and one of 16 bit, each with half of the elements.
    wide_bits = llm["bf16"].cache_usage().bits_per_element
    assert first.bits_per_element == second.bits_per_element == (both.bits_per_element + wide_bits) / 2


@pytest.mark.parametrize(
    ("kv", "window", "error", "sentence"),
    [
        ("bf16", 150, ParameterError, "bf16 codes nothing"),
        ("kv2", 1025, ContextLengthError, "context is 1025; this model takes up to 1024 tokens"),
    ],
)
def test_what_can_not_be_measured_is_one_clear_error(
    tiny_model: LoadedModel, kv: str, window: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        measure_layers(tiny_model, get_format(kv), [[1] * window])


def quality(kld: float) -> FormatQuality:
    windows = [WindowResult(3.1, 3.0, kld * f, 0.9, CacheUsage(150, 8000, 2500, 16_000)) for f in (0.9, 1.1)]
    return FormatQuality(get_format("kv2"), tuple(windows))


RESULTS = [quality(0.03), quality(0.01), quality(0.05)]


def test_rows_say_which_layers_and_which_share() -> None:
    rows = json.loads(layers_json(RESULTS, RUN))
    assert [row["layers"] for row in rows] == [[0], [1], [0, 1]]
    assert [row["kld_share"] for row in rows] == [pytest.approx(0.75), pytest.approx(0.25), None]
    assert [row["kld"] for row in rows] == pytest.approx([0.03, 0.01, 0.05])
    assert {"kld_interval", "ppl_increase", "same_top", "tokens", "model"} <= set(rows[0])
    assert layer_shares([quality(0.0), quality(0.0)]) == [0.0]


def test_the_table_fits_80_columns_and_shows_every_figure() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(layers_table(RESULTS, RUN))
    text = console.export_text()
    assert "…" not in text
    for shown in ("tiny: kv2 in one layer", "75%", "25%", "0.0300", "0.0500", "+10.5%", "adds up to 0.0400", "all"):
        assert shown in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_has_a_bar_per_layer(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save: Callable[..., None] = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    picture = layers_plot(RESULTS, RUN, suffix)
    assert picture.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    (axes,) = drawn[0].axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.03, 0.01])
    assert [round(bar.get_x() + bar.get_width() / 2, 6) for bar in axes.patches] == [0, 1]
    assert "0.0500" in axes.get_title(loc="left")
