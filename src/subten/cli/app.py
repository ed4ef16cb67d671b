"""The commands and what all of them share. Nothing here waits for torch: each command imports what it needs."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from subten import __version__
from subten.bench.commands import itl, latency, prefill, report
from subten.cli.agent_check import agent_check
from subten.cli.agent_mcp import agent_mcp
from subten.cli.agent_run import agent_replay, agent_run
from subten.cli.agent_sandbox import agent_build_image, agent_doctor
from subten.cli.calibrate import calibrate
from subten.cli.demo import demo
from subten.cli.eval_generate import eval_generate
from subten.cli.eval_kv import eval_kv
from subten.cli.eval_layers import eval_layers
from subten.cli.eval_retrieval import eval_retrieval
from subten.cli.info import info
from subten.cli.pull import pull
from subten.cli.run import run
from subten.cli.serve import serve

app = typer.Typer(
    help="Run language models with a KV cache of about 2 bits per element.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
evaluations = typer.Typer(help="Measure the quality of KV formats.", rich_markup_mode=None)
bench = typer.Typer(help="Measure how fast decode steps and prompts are.", rich_markup_mode=None)
agent = typer.Typer(help="Judge what agents want to run, and run it apart.", rich_markup_mode=None)
agent.command("check")(agent_check)
agent.command("run")(agent_run)
agent.command("replay")(agent_replay)
agent.command("doctor")(agent_doctor)
agent.command("build-image")(agent_build_image)
bench.command("latency")(latency)
bench.command("prefill")(prefill)
bench.command("itl")(itl)
bench.command("report")(report)
agent.command("mcp")(agent_mcp)
evaluations.command("kv")(eval_kv)
evaluations.command("retrieval")(eval_retrieval)
evaluations.command("generate")(eval_generate)
evaluations.command("layers")(eval_layers)
app.command()(run)
app.command()(serve)
app.command()(pull)
app.command()(info)
app.command()(calibrate)
app.add_typer(evaluations, name="eval")
app.add_typer(bench, name="bench")
app.add_typer(agent, name="agent")
app.command()(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"subten {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is chosen and why.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Run language models with a KV cache of about 2 bits per element."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
    logging.getLogger("subten").setLevel(logging.INFO if verbose else logging.WARNING)
    # Warnings of libraries are for developers; with --verbose they are logged.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if verbose else logging.ERROR)
