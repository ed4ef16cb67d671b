"""One QEMU process. Everything it opens is handed to it as an open file: it needs no paths and leaves nothing behind.

QEMU runs as a user of its own where that is possible, with its seccomp filter on, without a network card, and dies
with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from dataclasses import dataclass

from subten.agent.sandbox.channel import Channel, LostError
from subten.agent.sandbox.identity import as_user, new_user
from subten.agent.sandbox.microvm.counter import counter_khz
from subten.agent.sandbox.microvm.image import Image
from subten.agent.sandbox.microvm.monitor import Monitor, MonitorError
from subten.agent.sandbox.spawn import spawn
from subten.errors import SandboxError

QEMU = "qemu-system-x86_64"

BOOT_SECONDS = 60.0

_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_BOARD = "microvm,acpi=on,pic=off,pit=off,rtc=on,isa-serial=on,memory-backend=memory"
_KERNEL_LINE = " ".join(
    (
        "console=ttyS0 quiet panic=-1 reboot=t 8250.nr_uarts=1",
        # The board has no timer that others could be compared with; lpj is what the delay loop needs not find out.
        "no_timer_check tsc=reliable lpj=4000000 random.trust_cpu=on rcupdate.rcu_expedited=1",
        # TCG keeps what it has translated by virtual address: with the same layout in every process a program is
        # translated once, not at each start. Guests are thrown away and hold nothing to protect.
        "norandmaps mitigations=off init_on_alloc=0 randomize_kstack_offset=off",
        # What no guest uses and every start of a program would pay for.
        "audit=0 apparmor=0 lsm=capability cgroup_disable=memory transparent_hugepage=never psi=0",
    )
)


@dataclass(frozen=True)
class Accelerator:
    """What executes the guest's instructions.

    Attributes:
        name: "KVM" or "TCG".
        option: QEMU's -accel.
        processor: QEMU's -cpu.
        groups: groups that QEMU's user needs.
    """

    name: str
    option: str
    processor: str
    groups: tuple[int, ...] = ()


TCG = Accelerator("TCG", "tcg,thread=single,tb-size=64", "qemu64,+arat")
"""`arat`: the timer of the processor goes on while it sleeps. Without it the guest's kernel asks for 250 ticks a
second for ever, and a clone that only waits takes some 5 % of a core."""


@dataclass(frozen=True)
class Boot:
    """Open files that a machine starts from.

    Attributes:
        kernel: the kernel.
        ramdisk: the initial ramdisk.
    """

    kernel: int
    ramdisk: int


class Machine:
    """A QEMU process with its monitor and the channel to its guest agent."""

    def __init__(
        self, accelerator: Accelerator, memory_mib: int, memory: tuple[int, bool] | None, root: int, boot: Boot | None
    ) -> None:
        """Start it.

        Args:
            accelerator: what executes.
            memory_mib: size.
            memory: an open file and whether writes go into it; without one the memory is the process's own.
            root: the open root file system.
            boot: what to boot; without it the machine waits for a state to load.

        Raises:
            SandboxError: QEMU did not start.
        """
        self._console = os.memfd_create("console")
        monitor, its_monitor = socket.socketpair()
        channel, its_channel = socket.socketpair()
        passed = [its_monitor.fileno(), its_channel.fileno(), self._console, root]
        if memory is None:
            backend = f"memory-backend-ram,id=memory,size={memory_mib}M"
        else:
            passed.append(memory[0])
            backend = (
                f"memory-backend-file,id=memory,size={memory_mib}M,mem-path=/proc/self/fd/{memory[0]},"
                f"share={'on' if memory[1] else 'off'}"
            )
        command = [
            *(shutil.which(QEMU) or QEMU, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-M", _BOARD, "-accel", accelerator.option, "-cpu", accelerator.processor, "-smp", "1"),
            *("-m", f"{memory_mib}M", "-object", backend, "-sandbox", _SANDBOX),
            *("-chardev", f"socket,id=monitor,fd={its_monitor.fileno()}", "-mon", "chardev=monitor,mode=control"),
            *("-chardev", f"file,id=console,path=/proc/self/fd/{self._console}", "-serial", "chardev:console"),
            *("-device", "virtio-serial-device", "-chardev", f"socket,id=agent,fd={its_channel.fileno()}"),
            *("-device", "virtserialport,chardev=agent,name=agent"),
            *("-drive", f"if=none,id=root,format=raw,readonly=on,file.locking=off,file=/proc/self/fd/{root}"),
            *("-device", "virtio-blk-device,drive=root"),
        ]
        if boot is None:
            command += ["-incoming", "defer"]
        else:
            passed += [boot.kernel, boot.ramdisk]
            command += ["-kernel", f"/proc/self/fd/{boot.kernel}", "-initrd", f"/proc/self/fd/{boot.ramdisk}"]
            command += ["-append", f"{_KERNEL_LINE} tsc_early_khz={counter_khz()}"]
        prefix = as_user(new_user(), accelerator.groups, dies_with_parent=True)
        try:
            self._process = spawn([*prefix, *command], passed)
        except SandboxError:
            monitor.close()
            channel.close()
            os.close(self._console)
            raise
        finally:
            its_monitor.close()
            its_channel.close()
        self.process_id = self._process.pid
        self.channel = Channel(channel)
        self.monitor = Monitor(monitor)
        try:
            self.monitor.greet()
        except MonitorError as error:
            complaint = self.complaint()
            self.kill()
            self.channel.close()
            raise SandboxError(f"{QEMU} did not start: {complaint or error}") from error

    def complaint(self) -> str:
        """What QEMU or the guest's console said last; for a machine that has failed."""
        self._process.kill()
        assert self._process.stderr is not None
        said = self._process.stderr.read() + b"\n" + os.pread(self._console, 1 << 20, 0)[-4096:]
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def kill(self) -> None:
        """End it and close what it held. May be called again, from any thread."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            if self._process.stderr is not None:
                self._process.stderr.close()
        self.monitor.close()
        console, self._console = self._console, -1
        if console >= 0:
            os.close(console)


def boot(
    accelerator: Accelerator,
    image: Image,
    *,
    memory_mib: int,
    disk_mib: int,
    processes: int = 256,
    memory: int | None = None,
    seconds: float = BOOT_SECONDS,
) -> Machine:
    """A machine whose guest agent has answered.

    Args:
        accelerator: what executes.
        image: the guest.
        memory_mib: size.
        disk_mib: size of the writable layer.
        processes: that commands may have at a time.
        memory: an open file that holds its memory [default: one of its own].
        seconds: it may take.

    Raises:
        SandboxError: it did not boot in time; with what it said last.
    """
    with contextlib.ExitStack() as files:

        def until_booted(descriptor: int) -> int:
            files.callback(os.close, descriptor)
            return descriptor

        root = until_booted(os.open(image.root, os.O_RDONLY | os.O_CLOEXEC))
        kernel = until_booted(os.open(image.kernel, os.O_RDONLY | os.O_CLOEXEC))
        ramdisk = until_booted(os.memfd_create("ramdisk"))
        os.write(ramdisk, image.initial_ramdisk(disk_mib, json.dumps({"processes": processes})))
        if memory is None:
            memory = until_booted(memory_file(memory_mib))
        machine = Machine(accelerator, memory_mib, (memory, True), root, Boot(kernel, ramdisk))
        try:
            machine.channel.wait_ready(seconds)
        except LostError as error:
            complaint = machine.complaint()
            machine.kill()
            machine.channel.close()
            raise SandboxError(f"no guest booted with {accelerator.name}: {complaint or error}") from error
    return machine


def memory_file(mebibytes: int) -> int:
    """A file in memory for a machine's memory; it is gone when nobody has it open."""
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, mebibytes << 20)
    return descriptor
