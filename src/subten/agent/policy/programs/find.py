"""find: a walk that can delete, write and run commands."""

from __future__ import annotations

from subten.agent.policy.programs.effects import Act, Call, Effects, Program
from subten.agent.policy.symbols import ANY, BELOW, FIELDS, SOME_BELOW, activate

_WRITES = ("-fprint", "-fprint0", "-fls", "-fprintf")
_RUNS = ("-exec", "-execdir", "-ok", "-okdir")
_NEUTRAL = {"-depth": 0, "-d": 0, "-print": 0, "-print0": 0, "-ls": 0, "-xdev": 0, "-mount": 0, "-mindepth": 1}
_GLOBAL = ("-H", "-L", "-P", "-D", "-O")


class Walk:
    """The start folders of one find, and what its filters leave."""

    def __init__(self, starts: list[str]) -> None:
        self.starts = starts
        self.names: list[str] = []
        self.filtered = False

    def found(self) -> list[str]:
        """The paths that reach an action."""
        if self.filtered or len(self.names) > 1:
            tail = SOME_BELOW
        else:
            tail = BELOW + "".join("/" + activate(name) for name in self.names)
        return [f"{start}/{tail}" for start in self.starts]


def _find(call: Call) -> Effects:
    arguments = list(call.arguments)
    position = 0
    effects = Effects()
    starts: list[str] = []
    while position < len(arguments) and (
        arguments[position].startswith(_GLOBAL) or arguments[position][:1] not in ("-", "(", "!", ",")
    ):
        if not arguments[position].startswith(_GLOBAL):
            starts.append(arguments[position])
        position += 1
    walk = Walk(starts or ["."])
    if any(FIELDS in argument or argument.startswith(ANY) for argument in arguments):
        effects.opaque.append("find may get an action that is not known")
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "-delete":
            effects.touch(Act.REMOVE, walk.found(), tree=True)
        elif argument in _WRITES:
            effects.touch(Act.OVERWRITE, arguments[position : position + 1])
            position += 1
        elif argument in _RUNS:
            end = position
            while end < len(arguments) and not (
                arguments[end] == ";" or (arguments[end] == "+" and arguments[end - 1] == "{}")
            ):
                end += 1
            if end < len(arguments):
                _run(effects, walk, arguments[position:end])
            position = end + 1
        elif argument in _NEUTRAL:
            position += _NEUTRAL[argument]
        elif argument == "-name" and position < len(arguments):
            walk.names.append(arguments[position])
            position += 1
        elif argument == "-type" and arguments[position : position + 1] == ["d"]:
            position += 1
        else:
            # Any other test, also one whose operand is skipped here as a test of its own.
            walk.filtered = True
    return effects


def _run(effects: Effects, walk: Walk, command: list[str]) -> None:
    for path in walk.found():
        effects.commands.append([argument.replace("{}", path) for argument in command])


PROGRAMS: dict[str, Program] = {"find": Program(_find)}
