"""QEMU's monitor protocol (QMP) over a connected socket, as far as it is needed here."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

_REPLY_SECONDS = 30.0


class MonitorError(Exception):
    """QEMU refused a command, or is gone."""


class Monitor:
    """One command after the other; events are skipped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def greet(self) -> None:
        """Wait for QEMU's greeting, the first thing to do.

        Raises:
            MonitorError: it did not come.
        """
        self._read()
        self.command("qmp_capabilities")

    def command(self, name: str, descriptor: int | None = None, **arguments: Any) -> Any:
        """Run one command and return what it returns.

        Args:
            name: of the command.
            descriptor: an open file that goes with it.
            arguments: its own.

        Raises:
            MonitorError: see there.
        """
        request: dict[str, Any] = {"execute": name}
        if arguments:
            request["arguments"] = arguments
        line = json.dumps(request).encode() + b"\n"
        try:
            if descriptor is None:
                self._connection.sendall(line)
            else:
                socket.send_fds(self._connection, [line], [descriptor])
        except OSError as error:
            raise MonitorError(f"QEMU is gone: {error}") from error
        while True:
            reply = self._read()
            if "return" in reply:
                return reply["return"]
            if "error" in reply:
                raise MonitorError(f"QEMU refused {name}: {reply['error'].get('desc')}")

    def save(self, state: int, memory: bool) -> None:
        """Write the stopped machine's state to an open file, with its memory or without."""
        self._share_memory(not memory)
        self.command("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        self.command("getfd", state, fdname="state")
        self.command("migrate", uri="fd:state")
        self._wait_for_migration()

    def load(self, state: int, memory: bool) -> None:
        """Read what `save` wrote and let the machine run."""
        self._share_memory(not memory)
        self.command("getfd", state, fdname="state")
        self.command("migrate-incoming", uri="fd:state")
        self._wait_for_migration()
        if self.command("query-status")["status"] != "running":
            self.command("cont")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._connection.close()

    def _share_memory(self, shared: bool) -> None:
        # Memory that both sides map from one file is not copied.
        self.command("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": shared}])

    def _wait_for_migration(self) -> None:
        deadline = time.monotonic() + _REPLY_SECONDS
        while (status := self.command("query-migrate").get("status")) != "completed":
            if status == "failed" or time.monotonic() > deadline:
                raise MonitorError("QEMU could not move the machine's state")
            time.sleep(0.0005)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _REPLY_SECONDS
        while b"\n" not in self._buffer:
            try:
                self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self._connection.recv(1 << 16)
            except OSError as error:
                raise MonitorError(f"QEMU does not answer: {error}") from error
            if not part:
                raise MonitorError("QEMU is gone")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply
