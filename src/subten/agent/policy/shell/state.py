"""What is known about a shell at one point of a script: every value it may have there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from subten.agent.policy.shell.tree import Command
from subten.agent.policy.symbols import ANY, FIELDS

MAX_ALTERNATIVES = 16

Values = tuple[str, ...]
"""The texts that something may be; one that contains a symbol stands for many."""

UNKNOWN: Values = (ANY,)
DEFAULT_IFS = " \t\n"
_T = TypeVar("_T")


class State:
    """Variables, functions, aliases, working directory, links. Copied where a script branches."""

    __slots__ = (
        "aliases",
        "arrays",
        "cwd",
        "directories",
        "functions",
        "links",
        "positional",
        "previous_cwd",
        "variables",
        "wrote",
        "zero",
    )

    def __init__(self, cwd: Values) -> None:
        self.variables: dict[str, Values] = {}
        self.arrays: dict[str, tuple[str, ...]] = {}
        self.functions: dict[str, tuple[Command, ...]] = {}
        self.aliases: dict[str, Values] = {}
        self.cwd = cwd
        self.previous_cwd: Values = UNKNOWN
        self.positional: tuple[str, ...] = (FIELDS,)
        self.zero = ANY
        """`$0`."""
        self.directories: tuple[Values, ...] = ()
        """The stack of `pushd`."""
        self.links: dict[str, str] = {}
        """Paths that the script itself made lead somewhere else."""
        self.wrote = False
        """Whether the script may have written a file: code that later runs from files may then be its own."""

    def copy(self) -> State:
        """An independent copy."""
        other = State.__new__(State)
        other.variables = self.variables.copy()
        other.arrays = self.arrays.copy()
        other.functions = self.functions.copy()
        other.aliases = self.aliases.copy()
        other.cwd = self.cwd
        other.previous_cwd = self.previous_cwd
        other.positional = self.positional
        other.zero = self.zero
        other.directories = self.directories
        other.links = self.links.copy()
        other.wrote = self.wrote
        return other

    def inherited(self) -> State:
        """What a new shell process knows. Which variables are exported is not followed: each may be lacking there."""
        other = self.copy()
        other.variables = {name: limited((*values, "")) for name, values in self.variables.items() if name != "IFS"}
        other.arrays = {}
        other.functions = {}
        other.aliases = {}
        other.directories = ()
        return other

    def get(self, name: str) -> Values:
        """What a variable may hold; one that was never set comes from the environment and is unknown."""
        found = self.variables.get(name)
        if found is not None:
            return found
        array = self.arrays.get(name)
        if array is not None:
            return (array[0],) if array else ("",)
        if name == "PWD":
            return self.cwd
        if name == "OLDPWD":
            return self.previous_cwd
        return (DEFAULT_IFS,) if name == "IFS" else UNKNOWN

    def set(self, name: str, values: Iterable[str]) -> None:
        """Assign."""
        self.arrays.pop(name, None)
        self.variables[name] = limited(values)

    def same(self, other: State) -> bool:
        """Whether both say the same."""
        return all(getattr(self, slot) == getattr(other, slot) for slot in State.__slots__)


def limited(values: Iterable[str]) -> Values:
    """Without repetitions; too many are the same as unknown."""
    unique = tuple(dict.fromkeys(values))
    return unique if len(unique) <= MAX_ALTERNATIVES else UNKNOWN


def join(first: State | None, second: State | None) -> State | None:
    """What is known where two ways through a script meet; None is a way that ends before."""
    if first is None or first is second:
        return second
    if second is None:
        return first
    both = first.copy()
    if first.arrays != second.arrays:
        for name in first.arrays.keys() | second.arrays.keys():
            if first.arrays.get(name) != second.arrays.get(name):
                both.arrays[name] = (FIELDS,)
    if first.variables != second.variables:
        for name in first.variables.keys() | second.variables.keys():
            both.variables[name] = limited((*first.get(name), *second.get(name)))
            if name in both.arrays:
                del both.variables[name]
    both.functions = _union(first.functions, second.functions)
    both.aliases = _union(first.aliases, second.aliases)
    both.cwd = limited((*first.cwd, *second.cwd))
    both.previous_cwd = limited((*first.previous_cwd, *second.previous_cwd))
    if first.positional != second.positional:
        both.positional = (FIELDS,)
    if first.directories != second.directories:
        both.directories = ()
    for path, target in second.links.items():
        both.links[path] = target if first.links.get(path, target) == target else ANY
    both.wrote = first.wrote or second.wrote
    return both


def _union(first: Mapping[str, tuple[_T, ...]], second: Mapping[str, tuple[_T, ...]]) -> dict[str, tuple[_T, ...]]:
    if first == second:
        return dict(first)
    joined = dict(first)
    for name, values in second.items():
        known = joined.get(name, ())
        joined[name] = known + tuple(value for value in values if value not in known)
    return joined


def widened(before: State, after: State) -> State:
    """What holds after any number of rounds, given one round: whatever moved may be anything."""
    wide = join(before, after)
    assert wide is not None  # neither of the two is
    for name in wide.variables:
        if before.get(name) != after.get(name):
            wide.variables[name] = UNKNOWN
    for name in wide.arrays:
        if before.arrays.get(name) != after.arrays.get(name):
            wide.arrays[name] = (FIELDS,)
    if before.cwd != after.cwd:
        wide.cwd = UNKNOWN
    if before.previous_cwd != after.previous_cwd:
        wide.previous_cwd = UNKNOWN
    return wide
