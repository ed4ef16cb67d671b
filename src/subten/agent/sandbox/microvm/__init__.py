"""Sandboxes that are virtual machines: QEMU's microvm board, cloned from a running template."""

from subten.agent.sandbox.microvm.image import Image, build_image, find_image, why_not_buildable
from subten.agent.sandbox.microvm.machine import TCG, Accelerator, boot
from subten.agent.sandbox.microvm.probe import KVMProbe, accelerator, probe_kvm, why_no_machine
from subten.agent.sandbox.microvm.template import MicroVMClone, MicroVMTemplate

__all__ = [
    "TCG",
    "Accelerator",
    "Image",
    "KVMProbe",
    "MicroVMClone",
    "MicroVMTemplate",
    "accelerator",
    "boot",
    "build_image",
    "find_image",
    "probe_kvm",
    "why_no_machine",
    "why_not_buildable",
]
