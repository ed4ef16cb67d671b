"""What the sandboxes under test may use, and how their machines are set up."""

from __future__ import annotations

from subten.agent.sandbox import Limits

LIMITS = Limits(memory_mib=256, disk_mib=32, processes=250, output_bytes=100_000)

SETUP = ["echo ready > /tmp/setup", "kill -9 -1"]
"""The last kills all that a command can, the shell that waits for commands among it."""
