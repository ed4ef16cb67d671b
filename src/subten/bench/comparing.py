"""What follows from a time: its share of the floor, and how it compares with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subten.bench.machine import Machine
from subten.bench.timing import Timing


def compared(timing: Timing | None, nbytes: int, peers: Mapping[str, float], machine: Machine) -> dict[str, Any]:
    """Fields of a row of a kernel that must read and write so many bytes.

    Args:
        timing: of the kernel, or None where it has no figure.
        nbytes: at the machine's rate of reading they are the floor.
        peers: microseconds of others by name.
        machine: where all of them were measured.
    """
    us, floor = None if timing is None else timing.us, nbytes / machine.read_tb_per_s / 1e6
    peer = min(peers, key=lambda name: peers[name]) if peers else None
    return {
        "us": us,
        "us_p10": None if timing is None else timing.us_p10,
        "us_p90": None if timing is None else timing.us_p90,
        "bytes": nbytes,
        "floor_us": floor,
        "share": None if us is None else floor / us,
        "peer": peer,
        "peer_us": None if peer is None else peers[peer],
        "ratio": None if us is None or peer is None else peers[peer] / us,
        "peers": dict(peers),
    }
