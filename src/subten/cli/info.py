"""`subten info`: what is installed and chosen here, or what a model is and what its cache takes."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

import typer

from subten.cli.terminal import show, size

if TYPE_CHECKING:
    from rich.table import Table

    from subten.formats import CacheGeometry, PageLayout
    from subten.models import DecoderSpec

_EXAMPLE_HEAD_DIM = 128


def info(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf file, or name of a shipped or pulled model.")
    ] = None,
) -> None:
    """Show what runs here, or what a model is and needs.

    Without a model: versions, device, chosen kernels, KV formats. With one: its shape, its parameters, and what
    its cache takes in each format.
    """
    if model is None:
        _show_installation()
    else:
        _show_model(model)


def _show_installation() -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from subten.config import models_folder
    from subten.engine.graphs import why_no_graphs
    from subten.engine.loading import choose_device, choose_dtype
    from subten.engine.memory import free_memory
    from subten.formats import DEFAULT_FORMAT, FORMATS, PageLayout
    from subten.kernels.select import CACHED_ATTENTION, Use, select_attention, select_kernels

    device = choose_device()
    dtype = choose_dtype("auto", device)
    layouts = {name: PageLayout(fmt, _EXAMPLE_HEAD_DIM) for name, fmt in FORMATS.items()}
    attention = {name: select_attention(Use(device, dtype, (layout,))) for name, layout in layouts.items()}
    kernels = select_kernels(device)
    chosen = {**kernels.chosen, CACHED_ATTENTION: attention[DEFAULT_FORMAT].name}
    obstacle = why_no_graphs(device, kernels, attention[DEFAULT_FORMAT], experts=True)
    about = _facts()
    for package in ("subten", "torch", "triton", "transformers"):
        about.add_row(package, _version(package))
    about.add_row("python", platform.python_version())
    about.add_row("device", f"{device.type}, {size(free_memory(device))} free")
    about.add_row("models", str(models_folder()))
    about.add_row("kernels", ", ".join(f"{operation}={name}" for operation, name in chosen.items()))
    about.add_row("decode steps", "CUDA graphs" if obstacle is None else f"no CUDA graphs: {obstacle}")
    show(about)

    formats = Table(
        title=f"KV formats (bits per element of a full page at head_dim {_EXAMPLE_HEAD_DIM})", box=SIMPLE_HEAD
    )
    formats.add_column("name")
    for column in ("bits", "sinks", "recent"):
        formats.add_column(column, justify="right")
    formats.add_column("attention")
    formats.add_column("")
    for name, fmt in FORMATS.items():
        bits = layouts[name].coded_bits()
        formats.add_row(name, f"{bits:.3f}", str(fmt.sinks), str(fmt.recent), attention[name].name, fmt.summary)
    show(formats)


def _show_model(name: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from subten.checkpoints import open_checkpoint, resolve_model
    from subten.engine.loading import choose_device, choose_dtype
    from subten.engine.memory import free_memory
    from subten.formats import FORMATS, CacheGeometry, PageLayout
    from subten.kernels.select import Use, select_attention
    from subten.models import count_parameters, spec_from_config

    device = choose_device()
    dtype = choose_dtype("auto", device)
    path = resolve_model(name)
    spec = spec_from_config(open_checkpoint(path).config)
    attention = spec.attention
    geometry = CacheGeometry(spec.num_layers, attention.num_kv_heads, attention.head_dim)
    parameters = count_parameters(spec)
    weights = parameters.total * dtype.itemsize
    free = free_memory(device)

    about = _facts()
    about.add_row("model", str(path))
    about.add_row("family", spec.family)
    about.add_row("parameters", _parameters(parameters.total, parameters.active))
    about.add_row("weights", f"{size(weights)} as {str(dtype).removeprefix('torch.')}")
    about.add_row("layers", str(spec.num_layers))
    about.add_row("hidden size", str(spec.hidden_size))
    about.add_row("heads", f"{attention.num_heads} query, {attention.num_kv_heads} KV, head_dim {attention.head_dim}")
    about.add_row("feed-forward", _feed_forward(spec))
    about.add_row("vocabulary", str(spec.vocab_size))
    about.add_row("longest context", f"{spec.max_positions} tokens")
    about.add_row("memory", f"{size(free)} free on {device.type}, {size(max(0, free - weights))} beside the weights")
    show(about)

    longest = spec.max_positions
    table = Table(title="KV cache of one sequence", box=SIMPLE_HEAD)
    table.add_column("format")
    for column in ("bytes per token", f"at {longest} tokens", "bits per element", "longest that fits"):
        table.add_column(column, justify="right")
    for name, fmt in FORMATS.items():
        layout = PageLayout(fmt, attention.head_dim)
        layout = replace(layout, ahead=select_attention(Use(device, dtype, (layout,))).ahead)
        held = layout.cache_bytes(geometry, longest)
        fits = fitting_context(layout, geometry, free - weights, longest)
        table.add_row(
            name,
            f"{layout.coded_bits() * geometry.elements(1) / 8:,.0f}",
            size(held),
            f"{8 * held / geometry.elements(longest):.3f}",
            f"{fits} tokens" if fits else "none",
        )
    show(table)


def fitting_context(layout: PageLayout, geometry: CacheGeometry, memory: int, longest: int) -> int:
    """The longest sequence, up to `longest` tokens, whose cache takes at most `memory` bytes; 0 if none does."""
    return _last(lambda length: layout.cache_bytes(geometry, length) <= memory, longest)


def _last(holds: Callable[[int], bool], highest: int) -> int:
    """The highest number up to `highest` for which a condition holds that never holds again once it fails."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _facts() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _parameters(total: int, active: int) -> str:
    if active == total:
        return f"{total / 1e6:,.1f} M"
    return f"{total / 1e6:,.1f} M, of which a token uses {active / 1e6:,.1f} M"


def _feed_forward(spec: DecoderSpec) -> str:
    from subten.models import MoESpec

    kinds = {type(layer).__name__: layer for layer in spec.feed_forwards}
    texts = []
    for layer in kinds.values():
        if isinstance(layer, MoESpec):
            shared = (
                f" and a shared one of {layer.shared_intermediate_size}" if layer.shared_intermediate_size else ""
            )
            experts = f"{layer.router.num_experts} experts of {layer.intermediate_size}{shared}"
            texts.append(f"{experts}, {layer.router.top_k} per token")
        else:
            texts.append(f"dense, {layer.intermediate_size}")
    return "; ".join(texts)
