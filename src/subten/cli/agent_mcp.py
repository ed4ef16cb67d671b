"""`subten agent mcp`: the policy and the sandboxes as tools of other agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subten.cli.terminal import note
from subten.errors import ExtraMissingError


def agent_mcp(
    policy: Annotated[Path | None, typer.Option(help="Policy file [default: allow, and ask what is opaque].")] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Folder whose copy commands find at /workspace [default: an empty one].")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(help="microvm or process (not a VM) [default: microvm where it works, else process]."),
    ] = None,
    clones: Annotated[int, typer.Option(help="Sandboxes kept ready, and the most that run at a time, 1 to 64.")] = 2,
    http: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve streamable HTTP on this port of localhost instead of stdio."),
    ] = None,
) -> None:
    """Serve validate_command and run_in_sandbox to agents by the Model Context Protocol.

    Nothing but the protocol is written to the standard output.
    """
    from subten.agent.policy import Policy, load_policy

    try:
        from subten.agent.mcp_server import serve
    except ModuleNotFoundError as error:
        raise ExtraMissingError(f"an MCP server needs {error.name}; install subten[agent]") from error

    rules = Policy() if policy is None else load_policy(policy)
    serve(rules, workspace, tier, clones, http, note)
