"""`subten agent doctor` and `subten agent build-image`: the sandboxes of this machine."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from subten.cli.terminal import note

NOTHING_WORKS = 2


def agent_doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Say which sandboxes work here, why others do not, and how fast they are.

    Leaves with 2 where none works.
    """
    from subten.agent.sandbox.doctor import examine

    any_tier = False
    for finding in examine():
        any_tier = any_tier or finding.figures is not None
        if as_json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
            continue
        print(f"{'ok' if finding.works else '--'}  {finding.subject}: {finding.detail}", flush=True)
        if finding.figures is not None:
            figures = finding.figures
            print(
                f"    clone {figures.clone_ms:.0f} ms, first output {figures.first_output_ms:.0f} ms, "
                f"out of a pool {figures.taken_ms:.0f} ms, "
                f"a command {figures.exec_ms:.1f} ms (p99 {figures.exec_ms_p99:.1f}), "
                f"8 clones at once {figures.parallel_ms:.0f} ms",
                flush=True,
            )
    if not any_tier:
        raise typer.Exit(NOTHING_WORKS)


def agent_build_image(
    again: Annotated[bool, typer.Option("--again", help="Build it even where there is one.")] = False,
) -> None:
    """Make the guest of microVM sandboxes from Debian's packages.

    Fetches about 80 MB with apt once, installs nothing and needs no root; afterwards nothing is fetched.
    """
    from subten.agent.sandbox import build_image, find_image

    image = None if again else find_image()
    if image is None:
        image = build_image(note)
    print(f"{image.folder}: {len(image.packages)} packages")
