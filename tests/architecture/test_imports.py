"""The rooms import downwards only. Function-level and TYPE_CHECKING imports count."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import subten

PACKAGE = Path(subten.__file__).parent

# room -> what it may import directly; it may also import what those may import.
MAY_IMPORT = {
    "__init__": {"engine", "formats", "errors"},
    "errors": set(),
    "config": {"errors"},
    "outputs": {"errors"},
    "formats": {"errors"},
    "kernels": {"formats"},
    "kvcache": {"formats"},
    "checkpoints": {"formats", "config"},
    "models": {"kernels", "checkpoints"},
    "engine": {"models", "kvcache"},
    "evals": {"engine", "outputs"},
    "bench": {"engine", "agent", "outputs"},
    "agent": {"engine", "config"},
    "server": {"engine", "agent"},
    "cli": {"server", "evals", "bench", "agent", "engine", "config"},
    "__main__": {"cli"},
}
NO_TORCH = {"errors", "config", "outputs"}


def reachable(room: str) -> set[str]:
    found = {room}
    for below in MAY_IMPORT[room]:
        found |= reachable(below)
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import; write the full name"
            module = node.module or ""
            modules.append(module)
            if module == "subten":
                modules += [f"subten.{alias.name}" for alias in node.names]
    return modules


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_downwards(path: Path) -> None:
    room = room_of(path)
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "subten" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] in reachable(room), f"{room} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_lowest_rooms_are_free_of_torch(path: Path) -> None:
    if room_of(path) in NO_TORCH:
        assert not {m.split(".")[0] for m in imported_modules(path)} & {"torch", "triton"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "agent" / "policy").rglob("*.py")), ids=lambda p: p.name)
def test_the_policy_needs_neither_torch_nor_the_engine(path: Path) -> None:
    modules = imported_modules(path)
    assert not {module.split(".")[0] for module in modules} & {"torch", "triton", "transformers"}
    assert {m.split(".")[1] for m in modules if m.startswith("subten.")} <= {"agent", "errors"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "agent" / "sandbox").rglob("*.py")), ids=lambda p: p.name)
def test_sandboxes_need_neither_torch_nor_the_engine_nor_the_policy(path: Path) -> None:
    modules = imported_modules(path)
    assert not {module.split(".")[0] for module in modules} & {"torch", "triton", "transformers"}
    assert all(
        m.startswith(("subten.agent.sandbox", "subten.errors", "subten.config")) for m in modules if "subten" in m
    )


def test_the_guest_agent_needs_only_the_standard_library() -> None:
    modules = imported_modules(PACKAGE / "agent" / "sandbox" / "guest" / "agent.py")
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_only_kernels_import_triton() -> None:
    importers = {room_of(p) for p in SOURCES if any(m.split(".")[0] == "triton" for m in imported_modules(p))}
    assert importers <= {"kernels"}


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in SOURCES} <= set(MAY_IMPORT)


def test_the_rule_can_fail() -> None:
    assert "engine" not in reachable("formats")
    assert "kernels" not in reachable("kvcache")
    assert "formats" in reachable("engine")
