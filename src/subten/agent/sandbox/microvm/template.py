"""Templates and clones that are machines of their own: QEMU's microvm board.

A template boots once with its memory in a file in memory, gets the workspace, and stops; what is left is that file
and 50 KiB of device state. A clone is a QEMU that maps the file privately (copy on write) and loads the state: it
goes on where the template stopped. Then its clock is set and it gets randomness and a name of its own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from subten.agent.sandbox.guest.agent import WORKSPACE
from subten.agent.sandbox.identity import new_name
from subten.agent.sandbox.interface import Clone, Limits, Template
from subten.agent.sandbox.microvm.image import Image, find_image
from subten.agent.sandbox.microvm.machine import Accelerator, Machine, boot, memory_file
from subten.agent.sandbox.microvm.monitor import MonitorError
from subten.agent.sandbox.microvm.probe import accelerator, why_no_machine
from subten.agent.sandbox.workspace import Workspace
from subten.errors import SandboxError

_SETUP_SECONDS = 600.0


class MicroVMTemplate(Template):
    """Clones that are virtual machines.

    Attributes:
        image: the guest.
        accelerator: what executes its instructions.
        boot_seconds: from the start of QEMU to the first answer of the guest agent.
    """

    def __init__(
        self,
        workspace: Path | None = None,
        *,
        limits: Limits | None = None,
        setup: Sequence[str] = (),
        image: Image | None = None,
        accelerated_by: Accelerator | None = None,
    ) -> None:
        """Boot, copy the workspace in, run the setup, and take the snapshot that clones start from.

        Args:
            workspace: a folder whose copy clones find at /workspace; empty without.
            limits: what a clone may use. The memory limit is that of the machine.
            setup: commands to run before the snapshot; every clone has what they did, and the processes they left.
            image: the guest [default: the one that `build_image` made].
            accelerated_by: [default: KVM where a guest was seen to boot with it, else TCG].

        Raises:
            SandboxError: there is no QEMU or image, the guest did not boot, or a setup command failed.
        """
        chosen = image or find_image()
        reason = why_no_machine()
        if reason is not None or chosen is None:
            raise SandboxError(reason or "there is no guest image; make one with: subten agent build-image")
        self.accelerator = accelerated_by or accelerator(chosen)
        super().__init__(f"microvm ({self.accelerator.name})", limits or Limits(), Workspace(workspace))
        self.image = chosen
        self._open: list[int] = []
        try:
            self._root = self._keep(os.open(chosen.root, os.O_RDONLY | os.O_CLOEXEC))
            self._memory = self._keep(memory_file(self.limits.memory_mib))
            self._state = self._keep(os.memfd_create("state"))
            began = time.monotonic()
            machine = boot(
                self.accelerator,
                chosen,
                memory_mib=self.limits.memory_mib,
                disk_mib=self.limits.disk_mib,
                processes=self.limits.processes,
                memory=self._memory,
            )
            self.boot_seconds = time.monotonic() - began
            with MicroVMClone("template", self, machine) as origin:
                origin._put(self.workspace.entries(), WORKSPACE)
                for command in setup:
                    done = origin.exec(command, timeout=_SETUP_SECONDS)
                    if not done.ok:
                        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines() or [
                            "nothing"
                        ]
                        raise SandboxError(f"the setup command '{command}' failed with {done.exit_code}: {said[-1]}")
                origin._request({"do": "mark"})
                # The first run of anything is the slowest: what every command needs is read and translated by now.
                origin.exec("true")
                machine.monitor.command("stop")
                machine.monitor.save(self._state, memory=False)
        except MonitorError as error:
            self.close()
            raise SandboxError(f"no snapshot could be taken: {error}") from error
        except BaseException:
            self.close()
            raise

    def clone(self) -> MicroVMClone:
        """See Template."""
        if not self._open:
            raise SandboxError("the template was closed; no more clones can be made of it")
        machine = Machine(self.accelerator, self.limits.memory_mib, (self._memory, False), self._root, None)
        return self._awaken(machine, self._state, memory=False)

    def _awaken(self, machine: Machine, state: int, memory: bool) -> MicroVMClone:
        clone = MicroVMClone(new_name(), self, machine)
        try:
            # Every reader needs a place in the file of its own.
            source = os.open(f"/proc/self/fd/{state}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                machine.monitor.load(source, memory)
            finally:
                os.close(source)
            clone.refresh()
        except MonitorError as error:
            clone.kill()
            raise SandboxError(f"a clone could not be started: {error}") from error
        except BaseException:
            clone.kill()
            raise
        return clone

    def branch_of(self, machine: Machine) -> MicroVMClone:
        """A clone with the state and memory of a running machine, which pauses meanwhile."""
        state = os.memfd_create("branch")
        try:
            try:
                machine.monitor.command("stop")
                machine.monitor.save(state, memory=True)
            finally:
                machine.monitor.command("cont")
            return self._awaken(
                Machine(self.accelerator, self.limits.memory_mib, None, self._root, None), state, memory=True
            )
        except MonitorError as error:
            raise SandboxError(f"no branch could be made: {error}") from error
        finally:
            os.close(state)

    def close(self) -> None:
        """See Template."""
        while self._open:
            os.close(self._open.pop())
        super().close()

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor


class MicroVMClone(Clone):
    """A clone that is a virtual machine."""

    def __init__(self, name: str, template: MicroVMTemplate, machine: Machine) -> None:
        """For MicroVMTemplate."""
        super().__init__(name, template.tier, template.limits, template.workspace, machine.channel)
        self._template = template
        self._machine = machine

    @property
    def process_id(self) -> int:
        """See Clone: of its QEMU."""
        return self._machine.process_id

    def refresh(self) -> None:
        """Set the clock, stir in randomness of the host's, take on a name of its own."""
        fresh = {"entropy": secrets.token_hex(64), "name": self.name, "id": secrets.token_hex(16)}
        self._request({"do": "refresh", **fresh})
        # Last, when the guest has run this code once: its clock is behind by the time that the request takes.
        self._request({"do": "refresh", "seconds": time.time()})

    def branch(self) -> MicroVMClone:
        """Another machine with the same memory: files and running processes; this one pauses for some 0.1 s."""
        with self._one_at_a_time:
            if not self.alive:
                raise SandboxError(f"the clone {self.name} was ended; take a new one from its template")
            return self._template.branch_of(self._machine)

    def _end(self) -> None:
        self._machine.kill()
