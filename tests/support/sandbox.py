"""What the sandboxes under test may use."""

from __future__ import annotations

from subten.agent.sandbox import Limits

LIMITS = Limits(memory_mib=256, disk_mib=32, processes=600, output_bytes=100_000)
