"""All programs that are described, by name."""

from __future__ import annotations

from functools import lru_cache

from subten.agent.policy.programs import archives, files, find, git, interpreters, text, wrappers
from subten.agent.policy.programs.effects import Program

_PROGRAMS: dict[str, Program] = {
    **interpreters.PROGRAMS,
    **archives.PROGRAMS,
    **files.PROGRAMS,
    **find.PROGRAMS,
    **git.PROGRAMS,
    **text.PROGRAMS,
    **wrappers.PROGRAMS,
}
_INTERPRETER = Program(interpreters.interpret, monotone=False)


@lru_cache(maxsize=1024)
def find_program(name: str) -> Program | None:
    """The description of a program by its name without folders; None if there is none."""
    found = _PROGRAMS.get(name)
    if found is None and interpreters.INTERPRETER.fullmatch(name):
        return _INTERPRETER
    return found
