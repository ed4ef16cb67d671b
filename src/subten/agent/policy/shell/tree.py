"""What a shell text is made of. Offsets are characters of the judged text."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Text(NamedTuple):
    """Characters that stand for themselves; unquoted ones may still be patterns, braces or a tilde."""

    text: str
    quoted: bool


class Parameter(NamedTuple):
    """`$name` and every `${...}`. `operator` is what follows the name, `argument` what follows the operator."""

    name: str
    quoted: bool
    subscript: Word | None = None
    operator: str = ""
    argument: Word | None = None
    length: bool = False
    indirect: bool = False


class Substitution(NamedTuple):
    """`$(...)` and backticks."""

    script: Script
    quoted: bool


class Arithmetic(NamedTuple):
    """`$((...))`."""

    expression: Word
    quoted: bool


class ProcessSubstitution(NamedTuple):
    """`<(...)` and `>(...)`."""

    script: Script
    writes: bool


Part: TypeAlias = Text | Parameter | Substitution | Arithmetic | ProcessSubstitution


class Word(NamedTuple):
    """One word before any expansion."""

    parts: tuple[Part, ...]
    start: int
    end: int


class Heredoc:
    """The body of a here-document, known once the line that announced it has ended."""

    __slots__ = ("body", "delimiter", "quoted", "strip_tabs")

    def __init__(self, delimiter: str, *, quoted: bool, strip_tabs: bool) -> None:
        self.delimiter = delimiter
        self.quoted = quoted
        self.strip_tabs = strip_tabs
        self.body: Word | None = None


class Redirect(NamedTuple):
    """One redirection; a here-document has `heredoc`, the others have `target`."""

    operator: str
    target: Word | None
    heredoc: Heredoc | None
    descriptor: str


class Assignment(NamedTuple):
    """`name=value`, `name+=value`, `name[i]=value`, `name=(...)`."""

    name: str
    subscript: Word | None
    append: bool
    value: Word | None
    items: tuple[Word, ...] | None
    start: int
    end: int


class Simple(NamedTuple):
    """A simple command."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    redirects: tuple[Redirect, ...]
    start: int
    end: int


class Group(NamedTuple):
    """`{ ...; }` or `( ... )`."""

    script: Script
    subshell: bool
    redirects: tuple[Redirect, ...]


class If(NamedTuple):
    """Conditions with their bodies, in order, and what runs if none of them holds."""

    branches: tuple[tuple[Script, Script], ...]
    otherwise: Script | None
    redirects: tuple[Redirect, ...]


class Loop(NamedTuple):
    """`while` and `until` (a condition), and the C-like `for` (an arithmetic head)."""

    condition: Script | None
    head: Word | None
    body: Script
    redirects: tuple[Redirect, ...]


class For(NamedTuple):
    """`for` and `select` over words; no words means the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: Script
    redirects: tuple[Redirect, ...]


class Case(NamedTuple):
    """`case`: each item has its patterns and its body."""

    subject: Word
    items: tuple[tuple[tuple[Word, ...], Script], ...]
    redirects: tuple[Redirect, ...]


class Test(NamedTuple):
    """`[[ ... ]]` or `(( ... ))`: only its expansions can have an effect."""

    words: tuple[Word, ...]
    arithmetic: bool
    redirects: tuple[Redirect, ...]


class Function(NamedTuple):
    """A function definition."""

    name: str
    body: Command
    redirects: tuple[Redirect, ...]


class Coprocess(NamedTuple):
    """`coproc`."""

    command: Command
    redirects: tuple[Redirect, ...]


Command: TypeAlias = Simple | Group | If | Loop | For | Case | Test | Function | Coprocess


class Pipeline(NamedTuple):
    """Commands joined by pipes."""

    commands: tuple[Command, ...]
    negated: bool
    start: int
    end: int


class Item(NamedTuple):
    """A pipeline and the operator behind it: `;`, `&`, `&&`, `||`, or nothing at the end of the text."""

    pipeline: Pipeline
    operator: str


class Script(NamedTuple):
    """Pipelines in the order in which they are written."""

    items: tuple[Item, ...]
