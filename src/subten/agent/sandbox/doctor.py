"""What of the sandboxes works on this machine, why the rest does not, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from subten.agent.sandbox import process
from subten.agent.sandbox.figures import Figures, measure
from subten.agent.sandbox.microvm import MicroVMTemplate, find_image, probe_kvm, why_no_machine, why_not_buildable
from subten.agent.sandbox.process import ProcessTemplate
from subten.errors import SandboxError


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        works: whether it does; None where it is no matter of working.
        detail: what was seen, or what to do.
        figures: measured with it.
    """

    subject: str
    works: bool | None
    detail: str
    figures: Figures | None = None


def examine() -> Iterator[Finding]:
    """Look at one thing after the other; some take seconds."""
    yield _process_tier()
    yield from _microvm_tier()


def _process_tier() -> Finding:
    subject = "process sandboxes (not a VM)"
    reason = process.unavailable()
    if reason is not None:
        return Finding(subject, False, reason)
    try:
        with ProcessTemplate() as template:
            return Finding(subject, True, "bubblewrap on a copy-on-write root", measure(template))
    except SandboxError as error:
        return Finding(subject, False, str(error))


def _microvm_tier() -> Iterator[Finding]:
    reason = why_no_machine()
    yield Finding("QEMU", reason is None, reason or "installed")
    image = find_image()
    if image is None:
        advice = why_not_buildable() or "none yet; make one with: subten agent build-image"
        yield Finding("guest image", False, advice)
    else:
        kernel = next(
            (f"{name} {version}" for name, version in image.packages.items() if name.startswith("linux-image")),
            "unknown",
        )
        yield Finding("guest image", True, f"{image.folder}, kernel {kernel}")
    subject = "microVM sandboxes"
    if reason is not None or image is None:
        yield Finding(subject, False, reason or "there is no guest image")
        return
    kvm = probe_kvm(image)
    yield Finding("KVM", kvm.usable, kvm.reason)
    try:
        with MicroVMTemplate(image=image) as template:
            how = template.accelerator.name + ("" if kvm.usable else ", which executes without the processor's help")
            detail = f"{how}; a template boots in {template.boot_seconds:.1f} s"
            yield Finding(subject, True, detail, measure(template))
    except SandboxError as error:
        yield Finding(subject, False, str(error))
