"""The agent engine's figures: how fast each kind of sandbox is, and how fast the policy decides.

It needs no GPU. Times of sandboxes are wall time: on a machine that does other work they say little, so the load is
written beside them.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from subten.agent.policy import Policy, judge
from subten.agent.sandbox import MicroVMTemplate, ProcessTemplate, find_image
from subten.agent.sandbox.figures import measure
from subten.agent.sandbox.microvm import Accelerator, accelerator, boot, why_no_machine
from subten.agent.sandbox.process import unavailable
from subten.bench.host import describe_host
from subten.outputs import OutputFile

_COMMAND = (
    "git add -A && git commit -m 'what has changed, and why it had to be done today' && git log --oneline "
    "-n 5 | cat && grep -rn 'TODO' src tests docs | sort -u | head -n 20 > /tmp/todo.txt && wc -l /tmp/todo.txt"
)
_BOOT_MEMORY_MIB, _BOOT_DISK_MIB = 256, 64


def measure_agent(
    clones: int, commands: int, say: Callable[[str], None], commit: str | None = None
) -> dict[str, Any]:
    """Measure every tier that works here, and the policy.

    Args:
        clones: started one after the other in each tier, and boots where there are any.
        commands: timed in one clone of each tier.
        say: gets a line before each part.
        commit: of the source, where git can't tell.

    Returns:
        What is written as JSON: `machine`, `policy` and one row for each tier in `rows`; a tier that does not work
        has a row with the reason instead.
    """
    machine = describe_host(commit)
    say("policy")
    policy = _policy()
    rows = []
    for tier, measured in (("process", _process_row), ("microvm", _microvm_row)):
        say(tier)
        rows.append({"kind": tier, **measured(clones, commands)})
    return {
        "benchmark": "agent",
        "machine": machine,
        "policy": policy,
        "rows": rows,
    }


def run_agent(clones: int, commands: int, path: Path | None, say: Callable[[str], None], commit: str | None) -> bool:
    """Measure, print and write. Returns whether every tier has its figures."""
    file = None if path is None else OutputFile(path)
    result = measure_agent(clones, commands, say, commit)
    for row in result["rows"]:
        if "unavailable" in row:
            print(f"{row['kind']}: {row['unavailable']}")
            continue
        booted = f"cold boot {row['boot_ms']:.0f} ms, " if "boot_ms" in row else ""
        print(
            f"{row['tier']}: {booted}clone {row['clone_ms']:.1f} ms, first output {row['first_output_ms']:.1f} ms, "
            f"out of a pool {row['taken_ms']:.1f} ms, "
            f"command {row['exec_ms']:.2f} ms (p99 {row['exec_ms_p99']:.2f}), "
            f"8 at once {row['parallel_ms']:.0f} ms, memory {row['memory_mib']} MiB"
        )
    print(f"policy: {result['policy']['decisions_per_second']:.0f} decisions per second")
    if file is not None:
        file.write(json.dumps(result, indent=1).encode() + b"\n")
    return not any("unavailable" in row for row in result["rows"])


def _process_row(clones: int, commands: int) -> dict[str, Any]:
    reason = unavailable()
    if reason is not None:
        return {"unavailable": reason}
    with ProcessTemplate() as template:
        return dataclasses.asdict(measure(template, clones, commands))


def _microvm_row(clones: int, commands: int) -> dict[str, Any]:
    image = find_image()
    reason = why_no_machine() or (
        "there is no guest image; subten agent build-image makes one" if not image else None
    )
    if reason is not None or image is None:
        return {"unavailable": reason}
    how: Accelerator = accelerator(image)
    boots = []
    for _ in range(clones):
        began = time.perf_counter()
        machine = boot(how, image, memory_mib=_BOOT_MEMORY_MIB, disk_mib=_BOOT_DISK_MIB)
        boots.append((time.perf_counter() - began) * 1e3)
        machine.kill()
        machine.channel.close()
    with MicroVMTemplate(image=image, accelerated_by=how) as template:
        figures = dataclasses.asdict(measure(template, clones, commands))
    return {"boot_ms": round(statistics.median(boots), 1), "accelerator": how.name, **figures}


def _policy(rounds: int = 300) -> dict[str, Any]:
    policy = Policy(protect_paths=["/srv/data"])
    judge(policy, _COMMAND, "/home/me")
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        judge(policy, _COMMAND, "/home/me")
        times.append(time.perf_counter() - began)
    return {
        "characters": len(_COMMAND),
        "decision_ms": round(statistics.median(times) * 1e3, 3),
        "decisions_per_second": round(rounds / sum(times), 1),
    }
