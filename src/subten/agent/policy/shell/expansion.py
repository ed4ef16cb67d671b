"""Word resolution: what a word can become at one point of a script.

The order is bash's: braces, tilde, parameters, substitutions and arithmetic, word splitting, and patterns (which stay
symbols: whether a file name matches is a question of paths, not of words).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, Protocol

from subten.agent.policy.shell import arithmetic
from subten.agent.policy.shell.braces import expand_braces
from subten.agent.policy.shell.state import DEFAULT_IFS, MAX_ALTERNATIVES, UNKNOWN, State, Values, limited
from subten.agent.policy.shell.tree import (
    Arithmetic,
    Parameter,
    Part,
    ProcessSubstitution,
    Script,
    Substitution,
    Text,
    Word,
)
from subten.agent.policy.symbols import (
    ANY,
    FIELDS,
    NUMBER,
    RESERVED,
    STAR,
    activate,
    deactivate,
    is_known,
    settled,
    to_regex,
)

_NUMERIC = frozenset(
    ("?", "$", "!", "RANDOM", "SRANDOM", "SECONDS", "UID", "EUID", "PPID", "LINENO", "BASHPID", "EPOCHSECONDS")
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_LITERAL = re.compile(r"[A-Za-z0-9_@%+=:,./^-]*")
_EXTENDED_PATTERN = re.compile(r"[?*+@!]\(")


class Shell(Protocol):
    """What expansion needs of whoever runs it."""

    def run_substitution(self, script: Script, state: State) -> str | None:
        """Judge a command substitution and give its output where that is known."""

    def run_process(self, script: Script, state: State) -> None:
        """Judge a process substitution."""

    def mark_opaque(self, reason: str) -> None:
        """Something can't be known."""


class _Run(NamedTuple):
    """A stretch of an expanded word."""

    text: str
    split: bool
    """Whether it comes from an unquoted expansion, so that IFS splits it."""
    ends_field: bool = False
    """Whether a new field begins behind it, as between the elements of `"$@"`."""


def _plain(text: str) -> str:
    return activate(text)


class Expander:
    """Expands words; evaluates what they contain through a `Shell`."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def fields(self, word: Word, state: State) -> list[list[str]]:
        """The alternatives of a word's fields, each a list."""
        parts = word.parts
        if len(parts) == 1:
            only = parts[0]
            if isinstance(only, Text) and (only.quoted or _LITERAL.fullmatch(only.text)):
                return [[only.text]]
        alternatives: list[list[str]] = [[]]
        for expanded in expand_braces(parts):
            found = [self._split(runs, state) for runs in self._runs(expanded, state)]
            if len(alternatives) * len(found) > MAX_ALTERNATIVES:
                return [[FIELDS]]
            alternatives = [[*before, *fields] for before in alternatives for fields in found]
        return alternatives

    def text(self, word: Word | None, state: State, *, pattern: bool = False) -> Values:
        """What a word can be where it is not split: the value of an assignment, the subject of a `case`.

        `pattern` keeps unquoted pattern characters active.
        """
        if word is None:
            return ("",)
        parts = word.parts
        if len(parts) == 1 and isinstance(parts[0], Text) and (parts[0].quoted or _LITERAL.fullmatch(parts[0].text)):
            return (parts[0].text,)
        values = []
        for runs in self._runs(parts, state, assignment=not pattern):
            value = "".join(run.text + " " * run.ends_field for run in runs)
            values.append(value if pattern else deactivate(value))
        return limited(values)

    # Runs

    def _runs(self, parts: Sequence[Part], state: State, *, assignment: bool = False) -> list[list[_Run]]:
        choices: list[list[list[_Run]]] = []
        for index, part in enumerate(parts):
            if isinstance(part, Text):
                choices.append(self._literal(part, state, first=index == 0, parts=parts, assignment=assignment))
            elif isinstance(part, Parameter):
                choices.append(self._parameter(part, state))
            elif isinstance(part, Substitution):
                output = self._shell.run_substitution(part.script, state)
                known = ANY if output is None else output.rstrip("\n")
                choices.append([[self._value(known, part.quoted)]])
            elif isinstance(part, Arithmetic):
                values = self.arithmetic(part.expression, state)
                choices.append([[self._value(value, part.quoted)] for value in values])
            elif isinstance(part, ProcessSubstitution):
                self._shell.run_process(part.script, state)
                choices.append([[_Run(f"/dev/fd/{NUMBER}", False)]])
        count = 1
        for choice in choices:
            count *= len(choice)
        if count > MAX_ALTERNATIVES:
            return [[_Run(FIELDS, True)]]
        return [[run for runs in chosen for run in runs] for chosen in product(*choices)]

    def _value(self, text: str, quoted: bool) -> _Run:
        return _Run(text, False) if quoted else _Run(_plain(text), True)

    def _literal(
        self, part: Text, state: State, *, first: bool, parts: Sequence[Part], assignment: bool
    ) -> list[list[_Run]]:
        if part.quoted:
            return [[_Run(part.text, False)]]
        text = part.text
        if (first and text.startswith("~")) or (assignment and "~" in text):
            return [[_Run(tilde, False)] for tilde in self._tilde(text, state, alone=len(parts) == 1)]
        if _EXTENDED_PATTERN.search(text) or text in ("(", ")", "|"):
            return [[_Run(FIELDS, False)]]
        return [[_Run(_plain(text), False)]]

    def _tilde(self, text: str, state: State, *, alone: bool) -> Values:
        name, slash, rest = text.partition("/")
        if name == "~" and (slash or alone):
            homes = state.get("HOME")
        elif name == "~+":
            homes = state.cwd
        elif name == "~-":
            homes = state.previous_cwd
        else:
            return UNKNOWN
        return tuple(home + slash + _plain(rest) for home in homes)

    def _split(self, runs: Sequence[_Run], state: State) -> list[str]:
        fields: list[str] = []
        current: str | None = None
        for run in runs:
            if not run.split:
                current = (current or "") + run.text
            else:
                separators = state.get("IFS")
                if len(separators) != 1 or not is_known(separators[0]):
                    return [FIELDS]
                text = run.text.replace(ANY, FIELDS)
                pieces, leading, trailing = split_fields(text, separators[0])
                if leading and current is not None:
                    fields.append(current)
                    current = None
                for index, piece in enumerate(pieces):
                    if index and current is not None:
                        fields.append(current)
                        current = None
                    current = (current or "") + piece
                if trailing and current is not None:
                    fields.append(current)
                    current = None
            if run.ends_field and current is not None:
                fields.append(current)
                current = None
        if current is not None:
            fields.append(current)
        return list(map(settled, fields))

    # Parameters

    def _parameter(self, part: Parameter, state: State) -> list[list[_Run]]:
        if part.name in ("@", "*") and not part.operator and not part.length and not part.indirect:
            return [self._elements(state.positional, part, state)]
        if part.subscript is not None:
            subscripts = self.text(part.subscript, state)
            self._check_subscripts(subscripts)
            if subscripts in (("@",), ("*",)) and not (part.operator or part.length or part.indirect):
                return [self._elements(self._array(part.name, state), part, state)]
        values = self._values(part, state)
        return [[self._value(value, part.quoted)] for value in values]

    def _check_subscripts(self, subscripts: Values) -> None:
        if any("$(" in subscript or "`" in subscript for subscript in subscripts):
            self._shell.mark_opaque("a subscript that holds code is run by the shell")

    def _array(self, name: str, state: State) -> tuple[str, ...]:
        array = state.arrays.get(name)
        if array is not None:
            return array
        values = state.variables.get(name)
        return values if values is not None and len(values) == 1 else (FIELDS,)

    def _elements(self, elements: Sequence[str], part: Parameter, state: State) -> list[_Run]:
        star = part.name == "*" or (
            part.subscript is not None and part.name != "@" and self.text(part.subscript, state) == ("*",)
        )
        if part.quoted and star:
            separators = state.get("IFS")
            if len(separators) != 1 or FIELDS in elements:
                return [_Run(ANY, False)]
            return [_Run(separators[0][:1].join(elements), False)]
        if part.quoted:
            last = len(elements) - 1
            return [_Run(element, False, index < last) for index, element in enumerate(elements)]
        last = len(elements) - 1
        return [_Run(_plain(element), True, index < last) for index, element in enumerate(elements)]

    def _values(self, part: Parameter, state: State) -> Values:
        values = self._lookup(part, state)
        if part.indirect:
            values = self._indirect(part, values, state)
        if part.length:
            return limited(str(len(value)) if is_known(value) else NUMBER for value in values)
        operator = part.operator
        if not operator:
            return values
        if operator.lstrip(":") in ("-", "=", "+", "?"):
            return self._alternative(part, values, state)
        if operator in ("#", "##", "%", "%%"):
            patterns = self.text(part.argument, state, pattern=True)
            return limited(_without(value, pattern, operator) for value in values for pattern in patterns)
        if operator[0] == "/":
            return self._replaced(part, values, state)
        if operator == ":":
            return self._sliced(part, values, state)
        argument = self.text(part.argument, state)
        if operator in ("^^", ",,", "^", ",") and argument == ("",):
            return limited(_cased(value, operator) for value in values)
        if operator == "@" and argument == ("P",):
            self._shell.mark_opaque("`@P` expands a value as a prompt, which may hold code")
        return UNKNOWN

    def _lookup(self, part: Parameter, state: State) -> Values:
        name = part.name
        if name in _NUMERIC and name not in state.variables:
            return (NUMBER,)
        if name.isdigit():
            return (_positional(state.positional, int(name)),) if name != "0" else (state.zero,)
        if name == "#":
            return (NUMBER,) if FIELDS in state.positional else (str(len(state.positional)),)
        if name in ("@", "*"):
            return (" ".join(state.positional),) if all(map(is_known, state.positional)) else UNKNOWN
        if name == "-":
            return UNKNOWN
        if part.subscript is not None:
            return self._element(part, state)
        return state.get(name)

    def _element(self, part: Parameter, state: State) -> Values:
        assert part.subscript is not None  # the caller looked
        subscripts = self.text(part.subscript, state)
        elements = self._array(part.name, state)
        if part.operator or len(subscripts) != 1 or FIELDS in elements:
            return UNKNOWN
        if part.length and subscripts[0] in ("@", "*"):
            return (NUMBER,)
        index = arithmetic.evaluate(subscripts[0], {})
        if index == NUMBER or subscripts[0] in ("@", "*"):
            return UNKNOWN
        position = int(index)
        return (elements[position],) if -len(elements) <= position < len(elements) else ("",)

    def _indirect(self, part: Parameter, values: Values, state: State) -> Values:
        if part.operator == "prefix" or part.subscript is not None:
            return UNKNOWN
        found: list[str] = []
        for value in values:
            if not _NAME.fullmatch(value):
                if "[" in value or not is_known(value):
                    self._shell.mark_opaque("an indirect expansion of a name that is not known")
                return UNKNOWN
            found += state.get(value)
        return limited(found)

    def _alternative(self, part: Parameter, values: Values, state: State) -> Values:
        """`:-`, `:=`, `:+`, `:?` and their forms without a colon."""
        arguments = self.text(part.argument, state, pattern=True)
        if not part.quoted and part.argument is not None:
            arguments = tuple(deactivate(argument) for argument in arguments)
        empty_counts = part.operator[0] == ":"
        was_set = part.name in state.variables or part.name in state.arrays
        kind = part.operator[-1]
        found: list[str] = []
        for value in values:
            known = is_known(value)
            may_have = value != "" if known and empty_counts else True
            may_lack = value == "" if known and empty_counts and was_set else not known or not was_set
            if known and not empty_counts and was_set:
                may_lack = False
            if kind == "+":
                found += arguments if may_have else ()
                found += ("",) if may_lack else ()
            else:
                found += (value,) if may_have else ()
                found += arguments if may_lack and kind in "-=" else ()
        if kind == "=":
            state.set(part.name, found)
        return limited(found or ("",))

    def _replaced(self, part: Parameter, values: Values, state: State) -> Values:
        if part.argument is None:
            return UNKNOWN
        pattern_word, replacement_word = _divided(part.argument, "/")
        patterns = self.text(pattern_word, state, pattern=True)
        replacements = self.text(replacement_word, state) if replacement_word else ("",)
        return limited(
            _substituted(value, pattern, replacement, part.operator)
            for value in values
            for pattern in patterns
            for replacement in replacements
        )

    def _sliced(self, part: Parameter, values: Values, state: State) -> Values:
        expressions = self.text(part.argument, state)
        if len(expressions) != 1 or part.name in ("@", "*"):
            return UNKNOWN
        start, colon, length = expressions[0].partition(":")
        numbers = [self._number(start, state), self._number(length, state) if colon else ""]
        if NUMBER in numbers:
            return UNKNOWN
        first = int(numbers[0] or 0)
        found: list[str] = []
        for value in values:
            if not is_known(value):
                return UNKNOWN
            begin = max(len(value) + first, 0) if first < 0 else first
            if not colon:
                found.append(value[begin:])
                continue
            count = int(numbers[1] or 0)
            found.append(value[begin : begin + count] if count >= 0 else value[begin:count])
        return limited(found)

    # Arithmetic

    def arithmetic(self, word: Word, state: State) -> Values:
        """The values of an expression. What it assigns is some number afterwards."""
        return limited(self._number(text, state) for text in self.text(word, state))

    def _number(self, expression: str, state: State) -> str:
        if "$(" in expression or "`" in expression:
            self._shell.mark_opaque("arithmetic on a text that holds code runs it")
            return NUMBER
        variables: dict[str, str] = {}
        for name in arithmetic.names_in(expression):
            values = state.get(name)
            if any("$(" in value or "`" in value for value in values):
                self._shell.mark_opaque(f"arithmetic on `{name}`, which holds code, runs it")
            if len(values) == 1 and re.fullmatch(r"-?\d+", values[0]):
                variables[name] = values[0]
        if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", expression):
            for name in arithmetic.names_in(expression):
                state.set(name, (NUMBER,))
            return NUMBER
        return arithmetic.evaluate(expression, variables) if expression.strip() else "0"


def split_fields(text: str, separators: str) -> tuple[list[str], bool, bool]:
    """Word splitting: the pieces, and whether the text begins or ends with a separator."""
    if separators == DEFAULT_IFS:
        pieces = re.split(r"[ \t\n]+", text)
    elif not separators:
        return ([text] if text else []), False, False
    else:
        white = "".join(character for character in separators if character in DEFAULT_IFS)
        other = "".join(character for character in separators if character not in DEFAULT_IFS)
        spaces = f"[{re.escape(white)}]*" if white else ""
        pattern = f"{spaces}[{re.escape(other)}]{spaces}" if other else ""
        if white:
            pattern = f"{pattern}|[{re.escape(white)}]+" if pattern else f"[{re.escape(white)}]+"
        pieces = re.split(pattern, text)
    leading = len(pieces) > 1 and not pieces[0]
    trailing = len(pieces) > 1 and not pieces[-1]
    return [piece for piece in pieces if piece], leading, trailing


def _positional(elements: Sequence[str], number: int) -> str:
    before = elements[:number]
    if any(FIELDS in element for element in before):
        return ANY
    return before[number - 1] if len(before) >= number else ""


def _divided(word: Word, separator: str) -> tuple[Word, Word | None]:
    """A word cut at the first unquoted separator. Inside double quotes everything counts as unquoted here."""
    for index, part in enumerate(word.parts):
        if isinstance(part, Text) and separator in part.text:
            before, _, after = part.text.partition(separator)
            head = (*word.parts[:index], Text(before, part.quoted))
            tail = (Text(after, True), *word.parts[index + 1 :])
            return Word(head, word.start, word.end), Word(tail, word.start, word.end)
    return word, None


def _without(value: str, pattern: str, operator: str) -> str:
    if ANY in pattern or FIELDS in pattern or pattern.count(STAR) > 1 or not is_known(value) or len(value) > 1000:
        return ANY
    expression = re.compile(to_regex(pattern, slashes=True), re.DOTALL)
    lengths: Sequence[int] = range(len(value) + 1)
    if operator in ("##", "%%"):
        lengths = lengths[::-1]
    for length in lengths:
        cut = value[:length] if operator[0] == "#" else value[len(value) - length :]
        if expression.fullmatch(cut):
            return value[length:] if operator[0] == "#" else value[: len(value) - length]
    return value


def _substituted(value: str, pattern: str, replacement: str, operator: str) -> str:
    # Which of several matches counts as the longest is bash's affair: patterns are not followed.
    if RESERVED.search(pattern) or not is_known(value) or "&" in replacement:
        return ANY
    if not pattern:
        return value
    if operator == "//":
        return value.replace(pattern, replacement)
    if operator == "/#":
        return replacement + value[len(pattern) :] if value.startswith(pattern) else value
    if operator == "/%":
        return value[: -len(pattern)] + replacement if value.endswith(pattern) else value
    return value.replace(pattern, replacement, 1)


_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


def _cased(value: str, operator: str) -> str:
    return _CASES[operator](value) if is_known(value) else ANY
