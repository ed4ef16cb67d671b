"""What a command costs in a microVM under TCG, in instructions of the guest: a count that no other load changes.

QEMU's -icount lets the guest's clock advance by a nanosecond for each instruction, so the times that the guest agent
reports are counts. The commands run without a shell first, then with one, so that the parts can be told apart; those
with one in a shell that waited, and in one that is started for them.

    python tools/count_guest_instructions.py benchmarks/results/agent_instructions_tcg.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from subten.agent.sandbox.interface import Limits
from subten.agent.sandbox.microvm import TCG, MicroVMClone, MicroVMTemplate, boot, find_image, machine
from subten.agent.sandbox.spawn import spawn
from subten.agent.sandbox.workspace import Workspace

ROUNDS = 20
PROGRAMS = {
    "a static program, no shell": ["/workspace/busybox", "true"],
    "a dynamic program, no shell": ["/usr/bin/true"],
    "a shell that does nothing": ["/bin/sh", "-c", ":"],
    "a shell's own echo": ["/bin/sh", "-c", "echo ready"],
    "a shell that starts cat": ["/bin/sh", "-c", "cat /etc/passwd"],
    "a shell that starts git": ["/bin/sh", "-c", "git --version"],
}
NOT_WAITING = {"LD_NOTHING": "1"}
"""A shell whose loader may have to read a variable is started for its command."""


def spawn_counting(command: list[str], passed: list[int]) -> Any:
    """Start QEMU with its clock tied to instructions."""
    return spawn([*command, "-icount", "shift=0"], passed)


def main(path: Path) -> None:
    """Count and write."""
    machine.spawn = spawn_counting  # type: ignore[assignment]
    machine.counter_khz = lambda: 1_000_000  # type: ignore[assignment]
    image = find_image()
    assert image is not None, "there is no guest image; make one with: subten agent build-image"
    guest = boot(TCG, image, memory_mib=256, disk_mib=64, seconds=300)
    # As much of a template as a clone looks at.
    template = SimpleNamespace(tier="microvm (TCG)", limits=Limits(), workspace=Workspace())
    counts = {}
    with MicroVMClone("counted", cast("MicroVMTemplate", template), guest) as clone:
        clone.put({"busybox": (image.folder / "busybox").read_bytes()})
        clone.exec("chmod +x busybox")
        for name, argv in PROGRAMS.items():
            ways = {name: {}, f"{name}, started for it": NOT_WAITING} if argv[0] == "/bin/sh" else {name: {}}
            for way, variables in ways.items():
                counts[way] = round(statistics.median(count(clone, argv, variables) for _ in range(ROUNDS)))
                print(f"{counts[way]:>10,}  {way}", flush=True)
    template.workspace.close()
    packages = {name: image.packages[name] for name in ("dash", "libc6", "python3")}
    result = {"benchmark": "agent_instructions", "packages": packages, "rounds": ROUNDS, "instructions": counts}
    path.write_text(json.dumps(result, indent=1) + "\n")


def count(clone: MicroVMClone, argv: list[str], variables: dict[str, str]) -> float:
    """Instructions from the call that starts the program until its end was seen."""
    request = {"do": "exec", "argv": argv, "cwd": "/workspace", "output_bytes": 1 << 16}
    request["env"] = {"PATH": "/usr/bin", **variables}
    answer = clone._request(request, [(b"e", b"")], lambda *_: None, soft=60)
    return float(answer["seconds"]) * 1e9


if __name__ == "__main__":
    main(Path(sys.argv[1]))
