"""Sandboxes: where commands run that nobody has looked at. See docs/agent/sandbox.md.

A template is prepared once, with a copy of a folder; its clones are started in milliseconds and thrown away.
"""

from subten.agent.sandbox.changes import Change, Changes, Entry, Refusal
from subten.agent.sandbox.interface import Clone, Limits, Output, Result, Template
from subten.agent.sandbox.microvm import MicroVMTemplate, build_image, find_image
from subten.agent.sandbox.pool import MOST_CLONES, Pool, require_clones
from subten.agent.sandbox.process import ProcessTemplate

__all__ = [
    "MOST_CLONES",
    "Change",
    "Changes",
    "Clone",
    "Entry",
    "Limits",
    "MicroVMTemplate",
    "Output",
    "Pool",
    "ProcessTemplate",
    "Refusal",
    "Result",
    "Template",
    "build_image",
    "find_image",
    "require_clones",
]
