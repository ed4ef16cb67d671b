"""`python -m subten.bench`: the command line.

Exit codes: 0 every row has its figure, 1 some have not (the tables say why), 2 an error that one line on stderr
explains, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from subten.bench.commands import MISSING_FIGURES, itl, latency, prefill, report
from subten.bench.linear_session import LinearOptions, run_linear
from subten.bench.moe_session import MoEOptions, run_moe
from subten.bench.session import AttentionOptions, MeanKeys, run_attention
from subten.errors import SubtenError

app = typer.Typer(help="Measure kernels on a GPU, and sandboxes.", rich_markup_mode=None, no_args_is_help=True)
app.command()(latency)
app.command()(itl)
app.command()(prefill)
app.command()(report)

USAGE, INTERRUPTED = 2, 130
# click's ClickException. Recent releases of Typer carry their own copy of click under a private name.
_ClickException: Any = typer.BadParameter.__mro__[2]


@app.callback()
def _several_commands() -> None:
    """Measure kernels on a GPU, and sandboxes."""


@app.command()
def attention(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    fa3: Annotated[
        Path | None, typer.Option(help="Folder with _vllm_fa3_C*.so of vLLM's wheel: FlashAttention-3 as a peer.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Five rows: all shapes at 32k, and 1x8x4 at 128k.")] = False,
    rows: Annotated[str, typer.Option(help="Shapes, BATCHxKV_HEADSxGROUP[xHEAD_DIM], separated by commas.")] = "",
    contexts: Annotated[str, typer.Option(help="Contexts, such as 1k,32k, separated by commas.")] = "",
    formats: Annotated[
        str, typer.Option(help="KV formats of every row [default: kv2, and kv4,fp8,bf16 at 32k].")
    ] = "",
    kernels: Annotated[str, typer.Option(help="Decode kernels, separated by commas.")] = "triton,gluon",
    mean_key: Annotated[MeanKeys, typer.Option(help="Measure with the term of a mean key, without, or both.")] = (
        MeanKeys.BOTH
    ),
    append: Annotated[
        bool | None, typer.Option("--append/--no-append", help="Measure kv_append [default: unless --quick].")
    ] = None,
    replays: Annotated[int, typer.Option(min=20, help="Replays of each graph.")] = 25,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Decode attention over the quantised cache, beside torch's attention in 16 bit and FlashAttention-3.

    Every kernel is compared with the torch reference first; without that there is no figure.
    """
    options = AttentionOptions.parse(
        rows=rows,
        contexts=contexts,
        formats=formats,
        kernels=kernels,
        mean_key=mean_key,
        quick=quick,
        append=append,
        replays=replays,
    )
    if not run_attention(options, json, fa3, commit):
        raise typer.Exit(MISSING_FIGURES)


@app.command()
def agent(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    clones: Annotated[int, typer.Option(min=1, help="Clones, and boots, of each kind of sandbox.")] = 10,
    commands: Annotated[int, typer.Option(min=2, help="Commands timed in a clone.")] = 200,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Sandboxes and the policy of the agent engine. Needs no GPU, but a machine that does nothing else."""
    from subten.bench.agent import run_agent

    if not run_agent(clones, commands, json, lambda line: print(line, file=sys.stderr), commit):
        raise typer.Exit(MISSING_FIGURES)


@app.command()
def moe(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    shapes: Annotated[str, typer.Option(help="Models, separated by commas [default: all].")] = "",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, separated by commas, up to 8192 [default: 1 to 64].")
    ] = "",
    weights: Annotated[str, typer.Option(help="bf16, channel, block, separated by commas.")] = "block",
    kernels: Annotated[
        str, typer.Option(help="gluon, triton, and of prompts unfused, separated by commas.")
    ] = "gluon,triton,unfused",
    activations: Annotated[str, typer.Option(help="16bit, fp8x2, fp8, separated by commas.")] = "16bit,fp8x2,fp8",
    sums: Annotated[str, typer.Option(help="fixed, float, separated by commas.")] = "fixed",
    peer: Annotated[
        list[Path] | None, typer.Option(help="Python file with another implementation; may be repeated.")
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="Plans from this file of tools/tune_moe.py.")] = None,
    replays: Annotated[int, typer.Option(min=20, help="Replays of each graph.")] = 25,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """A mixture of experts in one launch, beside the unfused pipeline; prompts, of more than 64 tokens, in both ways.

    Every kernel is compared with float64 first; without that there is no figure.
    """
    options = MoEOptions.parse(
        shapes=shapes,
        tokens=tokens,
        weights=weights,
        kernels=kernels,
        activations=activations,
        sums=sums,
        replays=replays,
    )
    if not run_moe(options, json, peer or [], tuned, commit):
        raise typer.Exit(MISSING_FIGURES)


@app.command()
def linear(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="Layers, OUTPUTSxINPUTS[+norm][+normed][+residual], separated by commas "
            "[default: those of mix-32b-a9b and qwen3-30b-a3b]."
        ),
    ] = "",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, separated by commas.")] = "1,8,16,32",
    weights: Annotated[str, typer.Option(help="bf16, fp8, separated by commas.")] = "bf16,fp8",
    kernels: Annotated[str, typer.Option(help="gluon, triton, separated by commas.")] = "gluon,triton",
    replays: Annotated[int, typer.Option(min=20, help="Replays of each graph.")] = 25,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Linear layers of a decode step in one launch, with norm and residual, beside torch's products alone.

    Every kernel is compared with float64 first; without that there is no figure.
    """
    options = LinearOptions.parse(sizes=sizes, tokens=tokens, weights=weights, kernels=kernels, replays=replays)
    if not run_linear(options, json, commit):
        raise typer.Exit(MISSING_FIGURES)


class Tier(StrEnum):
    """What plans run in."""

    PROCESS = "process"
    MICROVM = "microvm"


@app.command()
def speculation(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    tasks: Annotated[Path, typer.Option(help="Folder of the tasks.")] = Path("examples/agent_tasks"),
    tier: Annotated[Tier, typer.Option(help="What plans run in.")] = Tier.PROCESS,
    ms_per_token: Annotated[
        float, typer.Option(min=0, help="Milliseconds from one scripted token to the next.")
    ] = 10.0,
    seconds: Annotated[float, typer.Option(help="For a plan, and for each check.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the draws of plans.")] = 0,
    most: Annotated[int | None, typer.Option(min=1, help="Tasks [default: all].")] = None,
    demo: Annotated[bool, typer.Option("--demo/--no-demo", help="Have the demo model propose as well.")] = True,
    note: Annotated[str | None, typer.Option(help="What else is to be known about the machine.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git can't tell.")] = None,
) -> None:
    """Several plans at once against one after the other, with scripted plans of known kinds. Needs no GPU."""
    from subten.bench.speculation import run_speculation

    run_speculation(
        tasks,
        json,
        tier=tier.value,
        ms_per_token=ms_per_token,
        seconds=seconds,
        seed=seed,
        most=most,
        demo=demo,
        note=note,
        say=lambda line: print(line, file=sys.stderr),
        commit=commit,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are `sys.argv[1:]` by default."""
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="python -m subten.bench", standalone_mode=False)
    except SubtenError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _ClickException as error:
        return _complain(error.format_message(), USAGE)
    return status if isinstance(status, int) else 0


def _complain(message: str, exit_code: int) -> int:
    """One line, whatever a library put into its message."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
