"""Triton kernels without a GPU: quicker in the interpreter, and compiled for one to see what a thread takes."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from support.interpreter_types import keep_types

_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class DeviceCode:
    """Registers of a thread, bytes of memory where they did not suffice, address and text of each instruction, what
    they were made of, in Triton's own terms, and bytes of shared memory of a program."""

    registers: int
    spilled: int
    sass: tuple[tuple[int, str], ...]
    ttir: str
    shared: int = 0

    def loops(self) -> list[list[str]]:
        """The instructions of each loop, from where a branch goes back to up to the branch."""
        loops = []
        for address, text in self.sass:
            back = re.search(r"\bBRA(?:\.\w+)* .*?(?:`\(\S+\)|0x([0-9a-f]+))", text)
            if back and back[1] and (start := int(back[1], 16)) < address:
                loops.append([line for at, line in self.sass if start <= at <= address])
        return loops

    def reachable(self, start: str, end: str, barrier: str) -> list[str]:
        """The instructions with `end` in them that can follow one with `start` without one with `barrier` between."""
        places = {address: place for place, (address, _) in enumerate(self.sass)}
        seen: set[int] = set()
        found: list[str] = []
        ahead = [place + 1 for place, (_, text) in enumerate(self.sass) if start in text]
        while ahead:
            place = ahead.pop()
            if place in seen or place >= len(self.sass):
                continue
            seen.add(place)
            text = self.sass[place][1]
            if barrier in text:
                continue
            if end in text:
                found.append(text)
            target = re.search(r"\b(?:BRA|CALL)\b.*?0x([0-9a-f]+)", text)
            if target and int(target[1], 16) in places:
                ahead.append(places[int(target[1], 16)])
            if not re.match(r"(?:BRA(?:\.\w+)* 0x|EXIT|RET)", text):
                ahead.append(place + 1)
        return found


def compile_kernel(
    kernel: Any,
    arguments: dict[str, Any],
    warps: int,
    capability: int,
    folder: Path,
    *,
    fp_fusion: bool,
    stages: int = 3,
    max_registers: int | None = None,
    listed: bool = True,
) -> DeviceCode:
    """Compile for a GPU of this compute capability as a launch with these arguments would. Instructions are there
    only where they are `listed`, which takes half a second."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):
                attributes[(index,)] = _DIVISIBLE
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": fp_fusion,
        "maxnreg": max_registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = compiled.asm
    file = folder / "kernel.cubin"
    file.write_bytes(code["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    options_of_tool = ["-res-usage", "-sass"] if listed else ["-res-usage"]
    about = subprocess.run([tool, *options_of_tool, file], check=True, capture_output=True, text=True).stdout
    registers, stack = (re.search(rf"{name}:(\d+)", about) for name in ("REG", "STACK"))
    assert registers is not None
    assert stack is not None
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", about)
    sass = tuple((int(at, 16), text) for at, text in instructions)
    return DeviceCode(int(registers[1]), int(stack[1]), sass, code.get("ttir", ""), compiled.metadata.shared)


def quicken_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the interpreter does over and over.

    Device functions find the language as their kernel has it: it makes it interpretable anew at every call of one,
    which takes longer than the call. For those of the language itself, once in a test is enough. It computes whether
    integers overflow, and looks at the outcome in debug mode only. It makes types of blocks in every operation.
    """
    prepared: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(module)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    keep_types(monkeypatch)
