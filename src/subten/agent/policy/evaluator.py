"""Follows a script through every way it may take, and collects what the policy says about each command on them.

Nothing is run. A state says what each variable, the working directory and so on may be at a point of the script;
where ways meet, states are joined. A command's success and failure are two ways, which is what makes
`cd build && rm -rf *` and `cd build; rm -rf *` different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TypeAlias

from subten.agent.policy.builtins import BUILTINS, check_variable
from subten.agent.policy.commands import CommandJudge
from subten.agent.policy.decision import Decision
from subten.agent.policy.policy import Policy
from subten.agent.policy.programs.effects import Act, ShellText
from subten.agent.policy.shell.expansion import Expander
from subten.agent.policy.shell.parser import IncompleteError, Parser, ShellSyntaxError
from subten.agent.policy.shell.state import MAX_ALTERNATIVES, UNKNOWN, State, Values, join, widened
from subten.agent.policy.shell.tree import (
    Assignment,
    Case,
    Command,
    Coprocess,
    For,
    Function,
    Group,
    If,
    Item,
    Loop,
    Pipeline,
    Redirect,
    Script,
    Simple,
    Test,
    Word,
)
from subten.agent.policy.symbols import ANY, FIELDS, NUMBER, is_known, is_unknown

MAX_STEPS = 20_000
MAX_CALL_DEPTH = 8
MAX_SCRIPT_DEPTH = 12
MAX_LOOP_ITEMS = 16

Outcome: TypeAlias = tuple[State | None, State | None]
"""The states after success and after failure; None where that can't happen."""


class Chain:
    """Where a list of pipelines stands: the two ways behind the last one, and the operator there."""

    __slots__ = ("failed", "last", "operator", "succeeded")

    def __init__(self, state: State) -> None:
        self.succeeded: State | None = state
        self.failed: State | None = None
        self.operator = ";"
        self.last = state

    def current(self) -> State:
        """Where the next pipeline begins."""
        if self.operator == "&&":
            state = self.succeeded
        elif self.operator == "||":
            state = self.failed
        else:
            state = join(self.succeeded, self.failed)
        return self.last if state is None else state


class Evaluator:
    """One judgement in progress."""

    def __init__(self, policy: Policy, cwd: str | None) -> None:
        self.judge = CommandJudge(policy)
        self._chain = Chain(State(UNKNOWN if cwd is None else (cwd,)))
        self.expander = Expander(self)
        self.stdin: str | None = None
        self.piped = False
        self.output: str | None = None
        """What the last command printed, where that is known."""
        self.complete = True
        """False while the command that is judged is still being written."""
        self.locals: list[dict[str, tuple[Values | None, tuple[str, ...] | None]]] = []
        self._escapes: list[State] = []
        self._steps = 0
        self._script_depth = 0

    @property
    def decision(self) -> Decision | None:
        """The strictest decision so far."""
        return self.judge.strictest

    # What expansion asks for

    def run_substitution(self, script: Script, state: State) -> str | None:
        """Judge a command substitution in a subshell; its output where one command gives it."""
        stdin, piped, complete = self.stdin, self.piped, self.complete
        self.complete = True
        self.output = None
        self._run_subshell(script, state)
        self.stdin, self.piped, self.complete = stdin, piped, complete
        output = self.output if len(script.items) == 1 else None
        self.output = None
        return output

    def run_process(self, script: Script, state: State) -> None:
        """Judge a process substitution."""
        self.run_substitution(script, state)

    def mark_opaque(self, reason: str) -> None:
        """Something can't be known."""
        self.judge.opaque(reason)

    # Scripts

    def run_items(self, items: Sequence[Item]) -> None:
        """Statements at the top level."""
        for item in items:
            self._run_item(item, self._chain)

    def run_open(self, command: Simple) -> None:
        """A simple command that may get more words. Only what no further word can change counts."""
        self.complete = False
        self.judge.only_certain = True
        try:
            self._simple(command, self._chain.current().copy())
        finally:
            self.complete = True
            self.judge.only_certain = False

    def run_sequence(self, items: Sequence[Item], state: State) -> State | None:
        """Pipelines with `;`, `&`, `&&` and `||` between them; the state behind the last."""
        chain = Chain(state)
        for item in items:
            self._run_item(item, chain)
        return join(chain.succeeded, chain.failed)

    def _run_item(self, item: Item, chain: Chain) -> None:
        skipped_success: State | None = None
        skipped_failure: State | None = None
        if chain.operator == "&&":
            before, skipped_failure = chain.succeeded, chain.failed
        elif chain.operator == "||":
            before, skipped_success = chain.failed, chain.succeeded
        else:
            before = join(chain.succeeded, chain.failed)
        # What can't be reached is judged all the same, with what was known last.
        start = before if before is not None else chain.last.copy()
        chain.last = start
        if item.operator == "&":
            inner = start.copy()
            self._pipeline(item.pipeline, inner)
            _share(inner, start)
            outcome: Outcome = (start, None)
        else:
            if start is skipped_success or start is skipped_failure:
                start = start.copy()
            outcome = self._pipeline(item.pipeline, start)
        if before is None:
            outcome = (None, None)
        chain.succeeded = join(outcome[0], skipped_success)
        chain.failed = join(outcome[1], skipped_failure)
        chain.operator = item.operator

    def run_text(self, text: str, state: State, what: str) -> Outcome:
        """Shell text that a command runs, such as the operand of `eval`."""
        if not is_known(text):
            self.mark_opaque(f"{what} runs shell text that is not known")
            return state, state
        if self._script_depth >= MAX_SCRIPT_DEPTH:
            self.mark_opaque("it nests shell text too deeply to be judged")
            return state, state
        self._script_depth += 1
        now: State | None = state
        try:
            parser = Parser(text, fixed=self.judge.span[0])
            while now is not None and (items := parser.next_statements()):
                now = self.run_sequence(items, now)
        except IncompleteError:
            self.mark_opaque(f"{what} runs shell text that is not complete")
        except ShellSyntaxError as error:
            self.mark_opaque(f"{what} runs shell text that can't be read: {error}")
        finally:
            self._script_depth -= 1
        return now, now

    def run_shell(self, script: ShellText, state: State, what: str) -> None:
        """The same in a new process, with the parameters that it gets."""
        inner = state.inherited()
        if script.parameters is None:
            inner.zero, inner.positional = ANY, (FIELDS,)
        elif script.parameters:
            inner.zero, *positional = script.parameters
            inner.zero = inner.zero.replace(FIELDS, ANY)
            inner.positional = tuple(positional) if FIELDS not in script.parameters[0] else (FIELDS,)
        else:
            inner.positional = ()
        self.run_text(script.text, inner, what)
        _share(inner, state)

    def _run_subshell(self, script: Script, state: State) -> None:
        inner = state.copy()
        escapes = len(self._escapes)
        self.run_sequence(script.items, inner)
        del self._escapes[escapes:]
        _share(inner, state)

    def escape(self, state: State) -> Outcome:
        """`return`, `break`, `continue`: what is known here also holds where the function or loop ends."""
        self._escapes.append(state.copy())
        return None, None

    # Commands

    def _pipeline(self, pipeline: Pipeline, state: State) -> Outcome:
        self.judge.span = (pipeline.start, pipeline.end)
        if len(pipeline.commands) == 1:
            outcome = self._command(pipeline.commands[0], state)
        else:
            stdin, piped = self.stdin, self.piped
            for command in pipeline.commands:
                inner = state.copy()
                self.output = None
                self._command(command, inner)
                _share(inner, state)
                self.stdin, self.piped = self.output, True
            self.stdin, self.piped = stdin, piped
            outcome = (state, state)
        return (outcome[1], outcome[0]) if pipeline.negated else outcome

    def _command(self, command: Command, state: State) -> Outcome:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooLongError
        if isinstance(command, Simple):
            return self._simple(command, state)
        self.output = None
        stdin, piped = self.stdin, self.piped
        self._redirect(command.redirects, state)
        outcome = self._compound(command, state)
        self.output = None
        self.stdin, self.piped = stdin, piped
        return outcome

    def _compound(self, command: Command, state: State) -> Outcome:
        if isinstance(command, Group):
            if command.subshell:
                self._run_subshell(command.script, state)
                return state, state
            return _both(self.run_sequence(command.script.items, state))
        if isinstance(command, If):
            return _both(self._if(command, state))
        if isinstance(command, For):
            return _both(self._for(command, state))
        if isinstance(command, Loop):
            return _both(self._loop(command, state))
        if isinstance(command, Case):
            return _both(self._case(command, state))
        if isinstance(command, Test):
            for word in command.words:
                values = self.expander.text(word, state, pattern=True)
                if command.arithmetic:
                    self._check_arithmetic(values, word, state)
            return state, state.copy()
        if isinstance(command, Function):
            state.functions[command.name] = (command.body,)
            return state, None
        assert isinstance(command, Coprocess)  # nothing else is left
        inner = state.copy()
        self._command(command.command, inner)
        _share(inner, state)
        return state, state

    def _check_arithmetic(self, values: Values, word: Word, state: State) -> None:
        for value in values:
            if "$(" in value or "`" in value:
                self.mark_opaque("a test on a text that holds code runs it")
                return
        self.expander.arithmetic(word, state)

    def _if(self, command: If, state: State) -> State | None:
        after: State | None = None
        remaining: State | None = state
        for condition, body in command.branches:
            entered = remaining or state.copy()
            ended = self._condition(condition, entered)
            yes = ended[0].copy() if ended[0] is not None else None
            if yes is not None:
                after = join(after, self.run_sequence(body.items, yes))
            remaining = ended[1]
        if command.otherwise is not None and remaining is not None:
            remaining = self.run_sequence(command.otherwise.items, remaining)
        return join(after, remaining)

    def _condition(self, script: Script, state: State) -> Outcome:
        """Success and failure of the last pipeline, where there is only one; otherwise both know the same."""
        if len(script.items) == 1:
            return self._pipeline(script.items[0].pipeline, state)
        return _both(self.run_sequence(script.items, state))

    def _rounds(self, run: Callable[[State], State | None], state: State) -> State | None:
        """A loop: once with what is known, then with what holds after any number of rounds."""
        escapes = len(self._escapes)
        before = state.copy()
        after = run(state.copy())
        ends = [after, *self._escapes[escapes:]]
        del self._escapes[escapes:]
        merged = None
        for end in ends:
            merged = join(merged, end)
        if merged is None or merged.same(before):
            return join(before, merged)
        wide = widened(before, merged)
        again = run(wide.copy())
        ends = [again, *self._escapes[escapes:], wide]
        del self._escapes[escapes:]
        for end in ends:
            merged = join(merged, end)
        return join(before, merged)

    def _loop(self, command: Loop, state: State) -> State | None:
        def once(current: State) -> State | None:
            if command.head is not None:
                self.expander.arithmetic(command.head, current)
            if command.condition is not None:
                succeeded, failed = self._condition(command.condition, current)
                if succeeded is None and failed is None:
                    return None
                entered = (succeeded or failed or current).copy()
                return join(failed, self.run_sequence(command.body.items, entered))
            return self.run_sequence(command.body.items, current)

        return self._rounds(once, state)

    def _for(self, command: For, state: State) -> State | None:
        if command.words is None:
            lists: list[list[str]] = [list(state.positional)]
        else:
            lists = self._fields(command.words, state)
        if len(lists) == 1 and len(lists[0]) <= MAX_LOOP_ITEMS and not any(FIELDS in item for item in lists[0]):
            # Known items: round by round, so that what one leaves behind meets the next.
            escapes = len(self._escapes)
            current: State | None = state.copy()
            for item in lists[0]:
                if current is None:
                    break
                current.set(command.name, (item,))
                left = len(self._escapes)
                current = self.run_sequence(command.body.items, current)
                for escaped in self._escapes[left:]:
                    current = join(current, escaped)
            del self._escapes[escapes:]
            return join(current, state)
        items = tuple(item.replace(FIELDS, ANY) for items in lists for item in items)

        def once(current: State) -> State | None:
            current.set(command.name, items or ("",))
            return self.run_sequence(command.body.items, current)

        return self._rounds(once, state)

    def _case(self, command: Case, state: State) -> State | None:
        self.expander.text(command.subject, state)
        after: State | None = state.copy()
        for patterns, body in command.items:
            for pattern in patterns:
                self.expander.text(pattern, state, pattern=True)
            after = join(after, self.run_sequence(body.items, state.copy()))
        return after

    # Simple commands

    def _fields(self, words: Iterable[Word], state: State) -> list[list[str]]:
        """The alternatives of a command's arguments."""
        choices = [self.expander.fields(word, state) for word in words]
        if all(len(choice) == 1 for choice in choices):
            return [[field for choice in choices for field in choice[0]]]
        count = 1
        for choice in choices:
            count *= len(choice)
            if count > MAX_ALTERNATIVES:
                return [[field for choice in choices for field in (choice[0] if len(choice) == 1 else [FIELDS])]]
        return [[field for fields in chosen for field in fields] for chosen in product(*choices)]

    def _simple(self, command: Simple, state: State) -> Outcome:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooLongError
        self.output = None
        span = (command.start, command.end)
        self.judge.span = span
        if not command.words:
            self._redirect(command.redirects, state)
            for assignment in command.assignments:
                self.assign(assignment, state)
            return state, state
        words: list[Word] = []
        for word in command.words:
            if isinstance(word, Assignment):
                self.assign(word, state)
            else:
                words.append(word)
        alternatives = self._fields(words, state)
        self.judge.span = span
        stdin, piped = self.stdin, self.piped
        self._redirect(command.redirects, state)
        self.judge.span = span
        kept: list[tuple[str, Values | None, tuple[str, ...] | None]] = []
        for assignment in command.assignments:
            kept.append(
                (
                    assignment.name,
                    state.variables.get(assignment.name),
                    state.arrays.get(assignment.name),
                )
            )
            self.assign(assignment, state)
        self.judge.span = span
        if len(alternatives) == 1:
            outcome = self.run_arguments(alternatives[0], state)
        else:
            ok: State | None = None
            failed: State | None = None
            for arguments in alternatives:
                one = self.run_arguments(arguments, state.copy())
                ok, failed = join(ok, one[0]), join(failed, one[1])
            self.output = None
            outcome = (ok, failed)
        self.stdin, self.piped = stdin, piped
        for after in outcome:
            if after is not None:
                for name, values, array in kept:
                    _restore(after, name, values, array)
        return outcome

    def assign(self, assignment: Assignment, state: State) -> None:
        """`name=value` and its kin."""
        name = assignment.name
        if assignment.items is not None:
            lists = self._fields(assignment.items, state)
            items = tuple(lists[0]) if len(lists) == 1 else (FIELDS,)
            if any(item.startswith("[") and "]=" in item for item in items):
                items = (FIELDS,)
            if assignment.append:
                items = (*state.arrays.get(name, (FIELDS,)), *items)
            state.variables.pop(name, None)
            state.arrays[name] = items
            values: Values = items[:1] or ("",)
        else:
            values = self.expander.text(assignment.value, state)
            if assignment.subscript is not None:
                for subscript in self.expander.text(assignment.subscript, state):
                    if "$(" in subscript or "`" in subscript:
                        self.mark_opaque("a subscript that holds code is run by the shell")
                state.variables.pop(name, None)
                state.arrays[name] = (FIELDS,)
            elif assignment.append:
                values = tuple(old + new for old in state.get(name) for new in values)
                state.set(name, values)
            else:
                state.set(name, values)
        check_variable(self, name, values, state)

    def run_arguments(self, arguments: list[str], state: State, *, functions: bool = True) -> Outcome:
        """A command whose words are expanded."""
        if not arguments:
            return state, state
        self.output = None
        name = arguments[0]
        if not is_known(name):
            self.judge.unknown_command(arguments)
            state.wrote = True
            return state, state
        if functions:
            if name in state.aliases:
                self._alias(name, arguments, state)
            bodies = state.functions.get(name)
            if bodies:
                return self._call(bodies, arguments, state)
        builtin = BUILTINS.get(name)
        if builtin is not None:
            self.judge.check_builtin(arguments, state, complete=self.complete)
            return builtin(self, arguments, state)
        return self.run_program(arguments, state)

    def _alias(self, name: str, arguments: list[str], state: State) -> None:
        """Aliases work only where the shell is told so: both readings are judged."""
        values = state.aliases[name]
        inner = state.copy()
        del inner.aliases[name]
        for value in values:
            rest = [argument if is_known(argument) else ANY for argument in arguments[1:]]
            self.run_text(" ".join([value, *map(_quoted, rest)]), inner, f"the alias {name}")
        _share(inner, state)

    def _call(self, bodies: tuple[Command, ...], arguments: list[str], state: State) -> Outcome:
        if len(self.locals) >= MAX_CALL_DEPTH:
            self.mark_opaque(f"the function {arguments[0]} calls itself too deeply to be judged")
            return state, state
        positional = state.positional
        after: State | None = None
        complete = self.complete
        for body in bodies:
            inner = state.copy()
            inner.positional = (*arguments[1:], *(() if complete else (FIELDS,)))
            self.locals.append({})
            escapes = len(self._escapes)
            self.complete = True
            ended = self._command(body, inner)
            self.complete = complete
            result = join(*ended)
            for escaped in self._escapes[escapes:]:
                result = join(result, escaped)
            del self._escapes[escapes:]
            if result is not None:
                for name, (values, array) in self.locals[-1].items():
                    _restore(result, name, values, array)
            self.locals.pop()
            after = join(after, result)
        if after is not None:
            after.positional = positional
        return _both(after)

    def run_program(self, arguments: list[str], state: State) -> Outcome:
        """A command that is no function and no builtin that changes the shell."""
        effects = self.judge.judge_program(
            arguments, state, stdin=self.stdin, piped=self.piped, complete=self.complete
        )
        for command in effects.commands:
            self._nested(command, state)
        for script in effects.scripts:
            self.run_shell(script, state, arguments[0])
        self.output = effects.output
        return state, state

    def _nested(self, command: list[str], state: State) -> None:
        """A command that a program runs: it sees no functions, no aliases and no builtins that change the shell."""
        inner = state.copy()
        span = self.judge.span
        while command and _is_assignment(command[0]):
            name, _, value = command[0].partition("=")
            check_variable(self, name.rstrip("+"), (value,), inner)
            command = command[1:]
        if command and command[0] in ("eval", "source", ".", "exec", "command", "builtin", "trap", "alias"):
            return
        self.run_arguments(command, inner, functions=False)
        self.judge.span = span
        _share(inner, state)

    # Redirections

    def _redirect(self, redirects: Sequence[Redirect], state: State) -> None:
        for redirect in redirects:
            if redirect.heredoc is not None:
                self.piped = True
                body = redirect.heredoc.body
                values = self.expander.text(body, state) if body is not None else UNKNOWN
                self.stdin = values[0] if len(values) == 1 and is_known(values[0]) else None
                continue
            assert redirect.target is not None  # only here-documents have none
            span = self.judge.span
            self.judge.span = (redirect.target.start, redirect.target.end)
            if redirect.operator == "<<<":
                values = self.expander.text(redirect.target, state)
                self.stdin = values[0] + "\n" if len(values) == 1 and is_known(values[0]) else None
                self.piped = True
            else:
                for fields in self.expander.fields(redirect.target, state):
                    for field in fields:
                        self._open(redirect, field, state)
            self.judge.span = span

    def _open(self, redirect: Redirect, path: str, state: State) -> None:
        operator = redirect.operator
        if operator in ("<", "<&"):
            if redirect.descriptor in ("", "0"):
                self.stdin, self.piped = None, True
            return
        if operator == ">&" and (path == "-" or path.rstrip("-").isdigit() or path == NUMBER):
            return
        if path in ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty") or path.startswith("/dev/fd/"):
            return
        act = Act.APPEND if operator in (">>", "&>>", "<>") else Act.OVERWRITE
        self.judge.judge_write(act, path, state, complete=True)
        state.wrote = True


class TooLongError(Exception):
    """The script has more steps than are followed."""


def _both(state: State | None) -> Outcome:
    return state, state


def _share(inner: State, outer: State) -> None:
    """What a subshell does to files stays done."""
    outer.wrote = outer.wrote or inner.wrote
    outer.links.update(inner.links)


def _restore(state: State, name: str, values: Values | None, array: tuple[str, ...] | None) -> None:
    state.variables.pop(name, None)
    state.arrays.pop(name, None)
    if values is not None:
        state.variables[name] = values
    if array is not None:
        state.arrays[name] = array


def _is_assignment(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.rstrip("+").isidentifier()


def _quoted(text: str) -> str:
    return text if is_unknown(text) else "'" + text.replace("'", "'\\''") + "'"
