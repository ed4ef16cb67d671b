"""The vocabulary in which programs are described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from subten.agent.policy.symbols import ANY, FIELDS, is_known


class Act(Enum):
    """What happens to a path."""

    REMOVE = "deletes"
    OVERWRITE = "overwrites"
    MOVE = "moves away"
    APPEND = "appends to"
    CHANGE = "changes the attributes of"


class Touch(NamedTuple):
    """One act on one path. `tree`: on all that lies below it, too."""

    act: Act
    path: str
    tree: bool = False


class Link(NamedTuple):
    """A new path that leads to an old one."""

    path: str
    target: str
    symbolic: bool


class ShellText(NamedTuple):
    """Text for a shell, and the parameters `$0`, `$1` and so on that it gets; None where they are not known."""

    text: str
    parameters: tuple[str, ...] | None = ()


@dataclass
class Effects:
    """What one command does, as far as it is known."""

    touches: list[Touch] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    """Commands that it runs, as arguments."""
    scripts: list[ShellText] = field(default_factory=list)
    """Shell text that it runs."""
    links: list[Link] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    """Why it can't be known what it does, one reason each."""
    code: list[str] = field(default_factory=list)
    """The same where the arguments are known and only the program's own behaviour is not: a rule can vouch for it."""
    output: str | None = None
    """What it prints, where that is known."""

    def touch(self, act: Act, paths: Iterable[str], *, tree: bool = False) -> Effects:
        """Add acts."""
        self.touches += [Touch(act, path, tree) for path in paths]
        return self


class Call(NamedTuple):
    """One command to be described."""

    name: str
    """Without folders."""
    arguments: Sequence[str]
    stdin: str | None
    """What it reads, where that is known."""
    wrote: bool
    """Whether the script may have written files before."""
    complete: bool
    """False while the command is still being written: more arguments may follow."""


Describe = Callable[[Call], Effects]


class Program(NamedTuple):
    """How to describe a program."""

    describe: Describe
    monotone: bool = True
    """Whether what it does with some arguments it also does with more behind them."""
    wraps: bool = False
    """Whether it only runs another command, so that the default is about that one."""
    described: bool = True
    """Whether the description says what happens to files; otherwise it is like that of a program nobody knows."""


@dataclass
class Options:
    """Arguments sorted into options and operands."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    operands: list[str] = field(default_factory=list)
    uncertain: bool = False
    """Whether an argument that is not known may be an option."""

    def has(self, *names: str) -> bool:
        """Whether one of the options is given; long ones may be abbreviated."""
        return any(
            flag in names or (flag.startswith("--") and len(flag) > 2 and any(n.startswith(flag) for n in names))
            for flag in self.flags
        )

    def value(self, *names: str) -> str | None:
        """The last value of one of the options."""
        found = [value for name in names for value in self.values.get(name, ())]
        return found[-1] if found else None


def parse(arguments: Sequence[str], short: str = "", long: Sequence[str] = (), *, permute: bool = True) -> Options:
    """Sort arguments as getopt does.

    Args:
        short: letters of the short options that take a value.
        long: names of the long options that take one, with their dashes.
        permute: options may follow operands; otherwise the first operand ends them, as for programs that run another.
    """
    options = Options()
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            options.operands += arguments[position:]
            break
        if not argument.startswith("-") or argument == "-":
            options.uncertain = options.uncertain or argument[:1] in (ANY, FIELDS) or FIELDS in argument
            options.operands.append(argument)
            if not permute:
                options.operands += arguments[position:]
                break
            continue
        options.uncertain = options.uncertain or not is_known(argument)
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            full = next((known for known in long if known == name), None) or next(
                (known for known in long if known.startswith(name)), None
            )
            options.flags.add(full or name)
            if equals:
                options.values.setdefault(full or name, []).append(value)
            elif full:
                options.values.setdefault(full, []).append(_at(arguments, position))
                position += 1
            continue
        for index in range(1, len(argument)):
            letter = "-" + argument[index]
            options.flags.add(letter)
            if argument[index] in short:
                rest = argument[index + 1 :]
                if not rest:
                    rest = _at(arguments, position)
                    position += 1
                options.values.setdefault(letter, []).append(rest)
                break
    return options


def _at(arguments: Sequence[str], position: int) -> str:
    return arguments[position] if position < len(arguments) else ANY


def basename(path: str) -> str:
    """The last name of a path."""
    return path.rstrip("/").rpartition("/")[2]


def nothing(_: Call) -> Effects:
    """A program that only reads and prints."""
    return Effects()
