"""Options that several commands take, each declared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from subten.errors import ParameterError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder, .gguf file, or name of a shipped or pulled model.")
]
Format = Annotated[str, typer.Option("--kv", help="KV format; `subten info` lists them.")]
Context = Annotated[int | None, typer.Option(help="Tokens of context [default: what the model and memory allow].")]
Sinks = Annotated[int | None, typer.Option(help="Tokens at the start kept in 16 bit [default: the format's].")]
Recent = Annotated[int | None, typer.Option(help="Newest tokens kept in 16 bit [default: the format's].")]
Prefill = Annotated[str, typer.Option(help="What a prompt's chunk sees of itself: `window` or `chunk`.")]
ChunkSize = Annotated[int, typer.Option(help="Prompt tokens per step.")]
ServedChunkSize = Annotated[
    int | None, typer.Option(help="Prompt tokens per step; unless given, 1024 on a GPU and 256 on a CPU.")
]
MaxKLD = Annotated[
    float | None, typer.Option(help="Refuse the format if it diverges by more from 16 bit, in nats per token.")
]
Dtype = Annotated[str, typer.Option(help="Compute type: auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Weights = Annotated[
    str, typer.Option(help="Weights kept in FP8: auto, 16bit (none), stored (experts, if stored so) or fp8 (all).")
]
Kernel = Annotated[
    list[str] | None,
    typer.Option(help="Insist on a kernel, as OPERATION=NAME; `subten info` lists them. Repeatable."),
]


def kernels(requested: Sequence[str] | None) -> dict[str, str]:
    """The `--kernel` options as a mapping from operation to implementation.

    Raises:
        ParameterError: one is not of the form OPERATION=NAME.
    """
    chosen: dict[str, str] = {}
    for item in requested or ():
        operation, equals, name = item.partition("=")
        if not (operation and equals and name):
            raise ParameterError(f"--kernel is '{item}'; it must be OPERATION=NAME, such as cached_attention=torch")
        chosen[operation] = name
    return chosen
