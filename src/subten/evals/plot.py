"""Pictures: quality against bits per element, and the loss of each layer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from subten.errors import ParameterError
from subten.evals.figures import percent
from subten.evals.metrics import Estimate
from subten.evals.quality import FormatQuality
from subten.evals.report import Run

_INK, _MUTED, _ACCENT = "#1b1f24", "#8a929c", "#c2410c"
_MARKER = 8
"""Half the width of a point with some air around it, in pixels."""
_KLD = "KL divergence from 16 bit (nats per token)"
_SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib(suffix: str) -> None:
    """Check before the long work that a picture can be drawn.

    Raises:
        ParameterError: matplotlib is not installed, or can't write files of this kind.
    """
    if suffix not in _SUFFIXES:
        raise ParameterError(f"a picture can't be a '{suffix}' file; it can be {', '.join(_SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ParameterError(
            "drawing a picture needs matplotlib, which is not installed; pip install 'subten[plot]'"
        ) from error


def quality_plot(results: Sequence[FormatQuality], run: Run, suffix: str = ".png") -> bytes:
    """Draw perplexity increase and KLD against bits per element, with 95% intervals; the bytes of the file.

    The vertical axes are linear up to 1% and 0.001 nats and logarithmic above: they have to hold both a format that
    changes nothing and one that destroys the model.
    """
    figure = _figure(f"{run.model}: quality against size of the KV cache", run)
    left, right = figure.subplots(1, 2)
    _panel(left, results, [percent(q.ppl_increase) for q in results], "perplexity increase (%)", 1.0)
    _panel(right, results, [q.kld for q in results], _KLD, 1e-3)
    _spread_labels(figure, [left, right])
    return _file(figure, suffix)


def layers_plot(results: Sequence[FormatQuality], run: Run, suffix: str = ".png") -> bytes:
    """Draw a bar for the KL divergence of each layer of `measure_layers`; the bytes of the file."""
    from matplotlib.ticker import MaxNLocator

    *alone, together = results
    figure = _figure(f"{run.model}: loss of each layer with its cache in {together.kv.name}", run)
    axes = figure.subplots()
    values = [quality.kld for quality in alone]
    axes.bar(range(len(alone)), [estimate.value for estimate in values], width=0.7, color=_ACCENT)
    for layer, estimate in enumerate(values):
        if estimate.low is not None and estimate.high is not None:
            axes.vlines(layer, estimate.low, estimate.high, color=_INK, linewidth=1.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.6, len(alone) - 0.4)
    axes.set_ylim(bottom=0)
    _plain_axes(axes)
    axes.set_xlabel("layer in the format, the others in 16 bit", color=_INK)
    axes.set_title(f"{_KLD}; all layers: {together.kld.value:.4f}", loc="left", fontsize=10, color=_INK)
    return _file(figure, suffix)


def _figure(title: str, run: Run) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), dpi=160, layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", weight="bold", color=_INK)
    windows = f"{run.tokens} tokens in windows of {run.context}, prefill {run.prefill}"
    figure.supxlabel(f"{windows}; lines: 95% intervals", x=0.012, ha="left", fontsize=8, color=_MUTED)
    return figure


def _file(figure: Any, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.removeprefix("."), facecolor="white")
    return buffer.getvalue()


def _plain_axes(axes: Any) -> None:
    axes.grid(axis="y", color=_MUTED, alpha=0.18)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)


def _panel(
    axes: Any, results: Sequence[FormatQuality], values: Sequence[Estimate], label: str, linear: float
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    for quality, estimate in zip(results, values, strict=True):
        color = _ACCENT if quality.kv.name == "kv2" else _INK
        x, y = quality.bits_per_element, estimate.value
        if estimate.low is not None and estimate.high is not None:
            axes.vlines(x, estimate.low, estimate.high, color=color, alpha=0.35, linewidth=1.6)
        axes.plot(x, y, "o", color=color, markersize=6)
        axes.annotate(quality.kv.name, (x, y), xytext=(7, 3), textcoords="offset points", fontsize=9, color=color)
    bits = [q.bits_per_element for q in results]
    axes.set_xlim(min(2.0, min(bits) * 0.9), max(bits) * 1.45)
    axes.set_xticks([b for b in (2, 3, 4, 6, 8, 12, 16, 24, 32) if axes.get_xlim()[0] <= b <= axes.get_xlim()[1]])
    plain = FuncFormatter(lambda value, _position: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(plain)
    axes.axhline(0, color=_MUTED, linewidth=0.8)
    _plain_axes(axes)
    axes.set_xlabel("bits per element, 16-bit windows included", color=_INK)
    axes.set_title(label, loc="left", fontsize=10, color=_INK)


def _spread_labels(figure: Any, panels: Sequence[Any]) -> None:
    """Move labels up until none lies on another or on a point. Where they lie is known only after layout."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    for axes in panels:
        points = [axes.transData.transform(label.xy) for label in axes.texts]
        taken = [Bbox.from_extents(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in points]
        for label in sorted(axes.texts, key=lambda text: (text.xy[1], text.xy[0])):
            while any(label.get_window_extent().overlaps(other) for other in taken):
                label.xyann = (label.xyann[0], label.xyann[1] + 2)
            taken.append(label.get_window_extent())
