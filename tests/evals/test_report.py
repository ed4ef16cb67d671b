from __future__ import annotations

import builtins
import io
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from subten.engine import CacheUsage
from subten.errors import ParameterError
from subten.evals.figures import sha256_of_text
from subten.evals.plot import quality_plot, require_matplotlib
from subten.evals.quality import FormatQuality, WindowResult
from subten.evals.report import Run, quality_table, to_json
from subten.formats import get_format

DOCUMENTED_KEYS = {
    *("format", "bits_per_element", "perplexity", "perplexity_16bit", "ppl_increase", "kld", "same_top"),
    *("tokens", "context", "sinks", "recent"),
}

RUN = Run(
    model="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    text_sha256=sha256_of_text("text"),
    context=1024,
    tokens=4096,
    decode_tail=64,
    prefill="window",
    chunk_size=256,
)


def quality(name: str, bits: float, increase: float, kld: float = 0.1, windows: int = 4) -> FormatQuality:
    results = [
        WindowResult(
            nll=3.0 + 0.1 * index + math.log1p(increase),
            nll_16bit=3.0 + 0.1 * index,
            kld=kld * (1 + 0.1 * index),
            same_top=0.9,
            usage=CacheUsage(1024, 8000, round(1000 * bits), 16_000),
        )
        for index in range(windows)
    ]
    return FormatQuality(get_format(name, sinks=4, recent=32), tuple(results))


def test_rows_have_the_documented_keys_and_units() -> None:
    (row,) = json.loads(to_json([quality("kv2", 2.5, increase=0.25)], RUN))
    assert set(row) >= DOCUMENTED_KEYS
    assert row["format"] == "kv2"
    assert row["bits_per_element"] == 2.5
    assert row["ppl_increase"] == pytest.approx(0.25)
    assert row["perplexity"] == pytest.approx(1.25 * row["perplexity_16bit"])
    assert row["perplexity_16bit"] == pytest.approx(math.exp(3.15))
    assert row["kld"] == pytest.approx(0.115)
    assert row["same_top"] == pytest.approx(0.9)
    assert (row["tokens"], row["context"], row["sinks"], row["recent"]) == (4096, 1024, 4, 32)
    assert (row["model"], row["prefill"], row["windows"], row["confidence"]) == ("tiny", "window", 4, 0.95)
    assert set(row["versions"]) == {"subten", "torch", "python"}
    low, high = row["kld_interval"]
    assert low < row["kld"] < high


def test_one_window_has_no_interval_and_a_destroyed_model_is_valid_json() -> None:
    (single,) = json.loads(to_json([quality("kv2", 2.5, 0.1, windows=1)], RUN))
    assert single["kld_interval"] is None
    destroyed = FormatQuality(
        get_format("article2"), (WindowResult(5000.0, 3.0, 99.0, 0.0, CacheUsage(1, 8, 16, 16)),)
    )
    (row,) = json.loads(to_json([destroyed], RUN))
    assert row["perplexity"] is None
    assert row["ppl_increase"] is None


def rendered(results: list[FormatQuality]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(quality_table(results, RUN))
    return console.export_text()


def test_the_table_fits_80_columns_and_shows_every_figure() -> None:
    text = rendered([quality("bf16", 16, 0, kld=0), quality("kv2", 2.5, 0.25), quality("article2", 19, 52.0)])
    assert "…" not in text
    for shown in (
        "tiny",
        "context 1024",
        "+25.0%",
        "[+25.0, +25.0]",
        "2.500",
        "0.1150",
        "90.0%",
        "+5,200.0%",
        "23.34",
    ):
        assert shown in text


def test_a_table_of_one_window_shows_no_brackets() -> None:
    assert "[" not in rendered([quality("kv2", 2.5, 0.25, windows=1)]).replace("brackets", "")


def test_the_picture_is_a_png_of_readable_size() -> None:
    png = quality_plot([quality("bf16", 16, 0, kld=0), quality("kv2", 2.5, 0.25)], RUN)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1200
    assert height >= 500


@pytest.mark.parametrize("bits", [(2.5, 2.5, 2.5, 2.5), (2.5, 2.8, 3.1, 3.4), (2.5, 3.0, 16.0, 16.1)])
def test_the_picture_names_every_format_and_no_label_covers_another_or_a_point(
    monkeypatch: pytest.MonkeyPatch, bits: tuple[float, ...]
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save: Callable[..., None] = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    names = ("kivi2", "kv2", "int4", "kv4")
    quality_plot([quality(name, b, 0.25) for name, b in zip(names, bits, strict=True)], RUN)
    for axes in drawn[0].axes:
        assert {text.get_text() for text in axes.texts} == set(names)
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        points = [axes.transData.transform(text.xy) for text in axes.texts]
        assert not any(box.contains(*point) for box in boxes for point in points)


def test_without_matplotlib_one_clear_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ParameterError, match=r"pip install 'subten\[plot\]'"):
        require_matplotlib(".png")


def test_a_picture_of_an_unknown_kind_is_one_clear_error() -> None:
    with pytest.raises(ParameterError, match=r"can't be a '\.txt' file; it can be \.png"):
        require_matplotlib(".txt")
