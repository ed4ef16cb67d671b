"""What this machine has for running microVMs. That a device exists says little: what counts is a guest that boots."""

from __future__ import annotations

import functools
import json
import platform
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from subten.agent.sandbox.channel import LostError
from subten.agent.sandbox.identity import new_user
from subten.agent.sandbox.microvm.image import Image
from subten.agent.sandbox.microvm.machine import QEMU, TCG, Accelerator, boot
from subten.errors import SandboxError

KVM_BOOT_SECONDS = 5.0
"""A guest under KVM boots in less than a second. Where it has not by then, it never will."""

_DEVICE = Path("/dev/kvm")


@dataclass(frozen=True)
class KVMProbe:
    """What came of trying KVM.

    Attributes:
        usable: a guest booted.
        reason: what was seen, as a sentence.
    """

    usable: bool
    reason: str


def why_no_machine() -> str | None:
    """Why no microVM can run here, images aside; None where one can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"microVMs need Linux on x86_64; this is {platform.system()} on {platform.machine()}"
    if shutil.which(QEMU) is None:
        return (
            f"microVMs need the program {QEMU}; install it: apt-get install --no-install-recommends qemu-system-x86"
        )
    if shutil.which("setpriv") is None:
        return "microVMs need the program setpriv; install the package util-linux"
    return None


@functools.cache
def accelerator(image: Image) -> Accelerator:
    """KVM where a guest boots with it, else TCG."""
    return _kvm() if probe_kvm(image).usable else TCG


def probe_kvm(image: Image) -> KVMProbe:
    """Whether a guest boots under KVM. Tried once for each boot of this machine, the answer kept with the image."""
    try:
        with _DEVICE.open("r+b", buffering=0):
            pass
    except OSError as error:
        return KVMProbe(False, f"{_DEVICE}: {error.strerror}")
    if new_user() is not None and not _open_to_others():
        return KVMProbe(False, f"{_DEVICE} is for root alone, and QEMU does not run as root; give it to a group")
    kept = image.folder / "kvm.json"
    key = {"boot": _boot_id(), "qemu": str(shutil.which(QEMU))}
    try:
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["key"] == key:
            return KVMProbe(known["usable"], known["reason"])
    except (OSError, ValueError, KeyError):
        pass
    probe = _try_kvm(image)
    _keep(kept, {"key": key, "usable": probe.usable, "reason": probe.reason})
    return probe


def _try_kvm(image: Image) -> KVMProbe:
    began = time.monotonic()
    try:
        machine = boot(_kvm(), image, memory_mib=256, disk_mib=16, seconds=KVM_BOOT_SECONDS)
    except SandboxError as error:
        return KVMProbe(False, f"{_DEVICE} opens, but {error}")
    try:
        machine.channel.request({"do": "ping"}, (), None, None, KVM_BOOT_SECONDS)
    except LostError as error:
        return KVMProbe(False, f"a guest booted under KVM, but {error}")
    finally:
        machine.kill()
        machine.channel.close()
    return KVMProbe(True, f"a guest booted under KVM in {time.monotonic() - began:.2f} s")


def _kvm() -> Accelerator:
    info = _DEVICE.stat()
    groups = (info.st_gid,) if info.st_mode & stat.S_IRGRP and info.st_gid != 0 else ()
    return Accelerator("KVM", "kvm", "host", groups)


def _open_to_others() -> bool:
    """Whether a user who is not root can open the device, alone or with the device's group."""
    info = _DEVICE.stat()
    wanted = stat.S_IROTH | stat.S_IWOTH
    group = stat.S_IRGRP | stat.S_IWGRP
    return info.st_mode & wanted == wanted or (info.st_mode & group == group and info.st_gid != 0)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _keep(path: Path, content: object) -> None:
    """Write it in one step; a folder that can't be written only means that the next process tries again."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        Path(file.name).replace(path)
    except OSError:
        return
