"""The pictures of docs/benchmarks, from committed measurements.

Colours are those of Okabe and Ito, which colour-blind people tell apart; markers and dashes say the same again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subten.bench.article import LIMIT_MS, drawn_attention, drawn_steps, pictured_moe
from subten.bench.published import Machine, Measured, Published, Row
from subten.bench.shapes import MAIN_CONTEXT, context_name
from subten.errors import ParameterError

_INK, _MUTED = "#1b1f24", "#8a929c"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX"
_KV_ORDER = ("kv2", "bf16", "kv4", "fp8", "int4")


def pictures(found: Published) -> dict[str, bytes]:
    """PNG files by name; those for which there is nothing are not there.

    Raises:
        ParameterError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ParameterError(
            "drawing pictures needs matplotlib, which is not installed; pip install 'subten[plot]'"
        ) from error
    drawn: dict[str, bytes] = {}
    if steps := drawn_steps(found.steps):
        drawn["latency.png"] = _latency(steps, found.steps)
        drawn["roofline.png"] = _roofline(steps, found.steps)
    if moe := pictured_moe(found.moe):
        drawn["moe.png"] = _moe(moe, found.moe)
    if attention := drawn_attention(found.attention):
        drawn["attention.png"] = _attention(attention, found.attention)
    return drawn


def _latency(rows: Sequence[Row], measured: Measured) -> bytes:
    def limit(axes: Any) -> None:
        axes.set_yscale("log")
        axes.axhline(LIMIT_MS, color=_INK, linewidth=1, linestyle=":")
        axes.annotate(
            "10 ms", (1.0, LIMIT_MS), xycoords=("axes fraction", "data"), va="bottom", ha="right", fontsize=8
        )
        _plain_numbers(axes.yaxis)

    title = f"p99 of a decode step at {context_name(MAIN_CONTEXT)}, ms"
    return _by_batch(rows, measured, title, lambda row: row["p99_ms"], limit)


def _roofline(rows: Sequence[Row], measured: Measured) -> bytes:
    def whole(axes: Any) -> None:
        axes.set_ylim(0, 105)

    title = f"Share of a decode step at {context_name(MAIN_CONTEXT)} in which memory must be read, %"
    return _by_batch(rows, measured, title, lambda row: 100 * row["share"], whole)


def _by_batch(
    rows: Sequence[Row], measured: Measured, title: str, value: Callable[[Row], float], finish: Callable[[Any], None]
) -> bytes:
    """A panel for each shape: a line for each cache, solid where experts are fused."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = _panels(title, shapes, measured)
    found = {row["kv"] for row in rows}
    formats = [*(kv for kv in _KV_ORDER if kv in found), *sorted(found - set(_KV_ORDER))]
    for shape, axes in zip(shapes, panels, strict=True):
        for index, kv in enumerate(formats):
            for moe, dashes in (("fused", "-"), ("unfused", "--")):
                line = sorted(
                    (row["batch"], value(row))
                    for row in rows
                    if (row["shape"], row["kv"], row["moe"]) == (shape, kv, moe)
                )
                if line:
                    axes.plot(
                        *zip(*line, strict=True),
                        dashes,
                        color=_COLOURS[index % len(_COLOURS)],
                        marker=_MARKERS[index % len(_MARKERS)],
                        markersize=5,
                        label=f"{kv}, {moe}",
                    )
        _batch_axis(axes, "batch", sorted({row["batch"] for row in rows}))
        axes.set_title(shape, loc="left", fontsize=10, color=_INK)
        finish(axes)
    _legend(figure, panels)
    return _png(figure)


def _moe(rows: Sequence[Row], measured: Measured) -> bytes:
    """A panel for each shape: microseconds of a block by tokens, over the time of reading its experts."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = _panels(
        "One mixture-of-experts block, time over the floor of reading its experts", shapes, measured, sharey=False
    )
    ours = list(dict.fromkeys(map(_variant, rows)))
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    for shape, axes in zip(shapes, panels, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        lines: dict[str, dict[int, float]] = {}
        for row in own:
            line = lines.setdefault(_variant(row), {})
            line[row["tokens"]] = min(line.get(row["tokens"], float("inf")), row["us"] / row["floor_us"])
        for row in own:
            for peer, us in row["peers"].items():
                lines.setdefault(peer, {})[row["tokens"]] = us / row["floor_us"]
        for index, name in enumerate([*ours, *peers]):
            if name not in lines:
                continue
            axes.plot(
                *zip(*sorted(lines[name].items()), strict=True),
                "--" if name in peers else "-",
                color=_COLOURS[index % len(_COLOURS)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                label=name,
            )
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)
        axes.axhline(1, color=_INK, linewidth=1, linestyle=":")
        _batch_axis(axes, "tokens", sorted({row["tokens"] for row in rows}))
        axes.set_title(shape, loc="left", fontsize=10, color=_INK)
    _legend(figure, panels)
    return _png(figure)


def _variant(row: Row) -> str:
    return f"subten {row['kernel']}, {row['weights']} {row['activations']}"


def _attention(rows: Sequence[Row], measured: Measured) -> bytes:
    """A panel for each batch and heads: how many times as fast as torch's fastest attention in 16 bit."""

    def shape(row: Row) -> str:
        return f"{row['batch']}x{row['kv_heads']}x{row['group']}"

    shapes = list(dict.fromkeys(map(shape, rows)))
    title = "Decode attention: speed over torch's fastest in 16 bit (batch x KV heads x group)"
    figure, panels = _panels(title, shapes, measured)
    for name, axes in zip(shapes, panels, strict=True):
        # The same order, and so the same colours, in all panels.
        lines: dict[str, dict[int, float]] = {f"{row['format']}, {row['kernel']}": {} for row in rows}
        for row in (row for row in rows if shape(row) == name):
            lines[f"{row['format']}, {row['kernel']}"][row["context"]] = row["ratio"]
            for peer, us in (("FA3, 16 bit", row["fa3_us"]), ("FA3, FP8", row["fa3_fp8_us"])):
                if us is not None:
                    lines.setdefault(peer, {})[row["context"]] = row["baseline_us"] / us
        for index, (label, line) in enumerate(lines.items()):
            if not line:
                continue
            axes.plot(
                *zip(*sorted(line.items()), strict=True),
                "--" if label.startswith("FA3") else "-",
                color=_COLOURS[index % len(_COLOURS)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                label=label,
            )
        axes.axhline(1, color=_INK, linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
        contexts = sorted({row["context"] for row in rows})
        _batch_axis(axes, "context", contexts, {tokens: context_name(tokens) for tokens in contexts})
        axes.set_title(name, loc="left", fontsize=10, color=_INK)
    _legend(figure, panels)
    return _png(figure)


def _panels(title: str, names: Sequence[str], measured: Measured, *, sharey: bool = True) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(1.2 + 3.6 * columns, 1.2 + 3.0 * lines), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", weight="bold", fontsize=11, color=_INK)
    figure.supxlabel(_said(measured.runs), x=0.012, ha="left", fontsize=8, color=_MUTED)
    grid = list(figure.subplots(lines, columns, squeeze=False, sharey=sharey).flat)
    for empty in grid[len(names) :]:
        empty.set_axis_off()
    return figure, grid[: len(names)]


def _said(runs: Sequence[tuple[str, Machine]]) -> str:
    return "; ".join(dict.fromkeys(f"{m['device']}, torch {m['torch']}, Triton {m['triton']}" for _, m in runs))


def _batch_axis(axes: Any, label: str, ticks: Sequence[int], names: Mapping[int, str] | None = None) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) if names is None else names[tick] for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label, fontsize=9, color=_INK)
    axes.grid(axis="y", color=_MUTED, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain = FuncFormatter(lambda value, _position: f"{value:g}")
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """One for all panels."""
    entries = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=8, frameon=False)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
