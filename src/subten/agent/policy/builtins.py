"""Commands that change the shell itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from subten.agent.policy.paths import absolute
from subten.agent.policy.programs.effects import Act, basename, parse
from subten.agent.policy.rules import STANDARD_FOLDERS, shown
from subten.agent.policy.shell.state import UNKNOWN, State, Values, limited
from subten.agent.policy.symbols import ANY, FIELDS, NUMBER, is_known, is_unknown

if TYPE_CHECKING:
    from subten.agent.policy.evaluator import Evaluator, Outcome

Builtin: TypeAlias = "Callable[[Evaluator, list[str], State], Outcome]"

_CODE_VARIABLES = re.compile(
    r"BASH_ENV|ENV|PROMPT_COMMAND|PS[0124]|LD_\w+|DYLD_\w+|SHELL|SHELLOPTS|BASHOPTS|BASH_FUNC_.*|BASH_LOADABLES_PATH|"
    r"PERL5OPT|PERL5LIB|PERL5DB|RUBYOPT|RUBYLIB|PYTHONSTARTUP|PYTHONHOME|PYTHONINSPECT|PYTHONBREAKPOINT|NODE_OPTIONS|"
    r"GIT_(?:SSH|SSH_COMMAND|EXTERNAL_DIFF|ASKPASS|EXEC_PATH|CONFIG\w*|PROXY_COMMAND|DIR|WORK_TREE|TEMPLATE_DIR|"
    r"INDEX_FILE)|MAKEFLAGS|GNUMAKEFLAGS|MAKEFILES|LESSOPEN|LESSCLOSE|TAR_OPTIONS|RSYNC_RSH|SUDO_ASKPASS|SSH_ASKPASS|"
    r"RIPGREP_CONFIG_PATH|CDPATH|HISTFILE|TMOUT|EXECIGNORE|JAVA_TOOL_OPTIONS|GCONV_PATH|AWKPATH|AWKLIBPATH"
)
_PROGRAM_VARIABLES = re.compile(r"EDITOR|VISUAL|PAGER|MANPAGER|BROWSER|GIT_(?:PAGER|EDITOR|SEQUENCE_EDITOR)|FCEDIT")
_HARMLESS_PROGRAMS = frozenset(("", "cat", "less", "more", "true", ":", "/bin/true", "/bin/cat"))


def check_variable(shell: Evaluator, name: str, values: Values, state: State) -> None:
    """Some variables decide which code later commands run."""
    if name == "PATH":
        folders = {folder for value in values for folder in value.split(":")}
        if not folders <= STANDARD_FOLDERS:
            shell.mark_opaque("PATH is changed: which programs later names stand for is not known")
    elif _CODE_VARIABLES.fullmatch(name) or (
        _PROGRAM_VARIABLES.fullmatch(name) and not set(values) <= _HARMLESS_PROGRAMS
    ):
        shell.mark_opaque(f"the variable {name} decides which code later commands run")
    elif state.wrote and name in ("PYTHONPATH", "NODE_PATH", "CLASSPATH", "HOME", "XDG_CONFIG_HOME"):
        shell.mark_opaque(f"the variable {name} leads programs to other code, and this script has written files")


def _neutral(_: Evaluator, __: list[str], state: State) -> Outcome:
    return state, state


def _cd(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    operands = [argument for argument in arguments[1:] if not re.fullmatch(r"-[LPe@]+|--", argument)]
    before = state.cwd
    failed = state.copy()
    if arguments[0] == "pushd":
        state.directories = (before, *state.directories)
        operands = [operand for operand in operands if operand != "-n"]
        if not operands or re.match(r"[-+]\d", operands[0]):
            state.cwd = UNKNOWN
            return state, failed
    if not operands:
        targets: Values = state.get("HOME")
    elif operands[0] == "-":
        targets = state.previous_cwd
    elif FIELDS in operands[0] or not shell.complete:
        targets = UNKNOWN
    else:
        targets = (operands[0],)
    if targets == ("",):
        return state, failed
    state.cwd = limited(absolute(target, cwd) for target in targets for cwd in before)
    state.previous_cwd = before
    return state, failed


def _popd(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    failed = state.copy()
    if len(arguments) > 1 or not state.directories:
        state.cwd = UNKNOWN
        state.directories = ()
    else:
        state.cwd, *rest = state.directories
        state.directories = tuple(rest)
    return state, failed


def _eval(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    words = arguments[2:] if arguments[1:2] == ["--"] else arguments[1:]
    complete = shell.complete
    outcome = shell.run_text(" ".join(words), state, "eval") if complete else (state, state)
    shell.complete = complete
    return outcome


def _source(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    if len(arguments) > 1:
        shell.mark_opaque(f"`{shown(arguments)}` runs a file whose content this policy does not read")
    return state, state


def _run_rest(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    """`command`, `builtin`, `exec`: options, then a command that is no function."""
    options = parse(arguments[1:], "a" if arguments[0] == "exec" else "", permute=False)
    if arguments[0] == "command" and options.has("-v", "-V"):
        return state, state
    if options.uncertain and not options.operands:
        shell.judge.unknown_command(arguments)
    if not options.operands:
        return state, state
    outcome = shell.run_arguments(options.operands, state, functions=False)
    return (None, outcome[1]) if arguments[0] == "exec" else outcome


def _trap(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    operands = parse(arguments[1:], permute=False).operands
    if operands and operands[0] not in ("-", ""):
        # It runs at some later time, with what is known then.
        inner = state.copy()
        inner.positional = (FIELDS,)
        shell.run_text(operands[0], inner, "trap")
        if "$" in operands[0]:
            shell.mark_opaque("trap runs shell text later, with variables that may have changed")
    return state, state


def _alias(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    for argument in arguments[1:]:
        name, equals, value = argument.partition("=")
        if equals:
            state.aliases[name] = (*state.aliases.get(name, ()), value)
    return state, state


def _declare(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    flags = {letter for argument in arguments[1:] if re.match(r"[-+]\w", argument) for letter in argument[1:]}
    if flags & set("niulc") and arguments[0] not in ("export", "readonly"):
        shell.mark_opaque(f"`{shown(arguments)}` changes what later assignments mean")
    if "f" in flags and arguments[0] in ("export", "declare", "typeset"):
        return _code(shell, arguments, state)
    if flags & set("fFp"):
        return state, state
    local = shell.locals and arguments[0] in ("local", "declare", "typeset") and "g" not in flags
    for argument in arguments[1:]:
        name, equals, value = argument.partition("=")
        append = name.endswith("+")
        name = name.rstrip("+")
        _check_code(shell, argument)
        if is_unknown(argument) and not name.isidentifier():
            shell.mark_opaque(f"`{shown(arguments)}` sets variables whose names are not known")
            continue
        if not name.isidentifier():
            continue
        if local:
            shell.locals[-1].setdefault(name, (state.variables.get(name), state.arrays.get(name)))
        if equals:
            values = tuple(old + value for old in state.get(name)) if append else (value,)
            state.set(name, values)
            check_variable(shell, name, values, state)
        elif local:
            state.set(name, ("",))
    return state, state


def _unset(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    for name in arguments[1:]:
        _check_code(shell, name)
        if name.isidentifier():
            # Unset and set to nothing differ only for `${name-...}`.
            state.set(name, ("", ANY))
            state.functions.pop(name, None)
    return state, state


def _unalias(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    for name in arguments[1:]:
        state.aliases.pop(name, None)
    return state, state


def _set(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    rest = arguments[1:]
    position = 0
    while position < len(rest) and rest[position][:1] in ("-", "+") and rest[position] not in ("--", "-"):
        position += 2 if rest[position][1:] == "o" else 1
    if position < len(rest):
        operands = rest[position + 1 :] if rest[position] in ("--", "-") else rest[position:]
        if operands or rest[position] == "--":
            state.positional = tuple(operands)
    if any(FIELDS in argument for argument in rest[:position]):
        state.positional = (FIELDS,)
    return state, state


def _shift(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    count = arguments[1] if len(arguments) > 1 else "1"
    if not count.isdigit() or any(FIELDS in argument for argument in state.positional[: int(count)]):
        state.positional = (FIELDS,)
    else:
        state.positional = state.positional[int(count) :]
    return state, state


def _read(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    options = parse(arguments[1:], "adinNptu")
    for argument in options.operands:
        _check_code(shell, argument)
    names = options.operands or ["REPLY"]
    line = shell.stdin.partition("\n")[0].strip(" \t") if shell.stdin is not None else ANY
    simple = len(names) == 1 and "\\" not in line and not options.flags & {"-a", "-d", "-n", "-N", "-u"}
    for name in [*names, *options.values.get("-a", ())]:
        state.set(name, (line,) if simple and state.get("IFS") == (" \t\n",) else UNKNOWN)
    for name in options.values.get("-a", ()):
        state.variables.pop(name, None)
        state.arrays[name] = (FIELDS,)
    return state, state.copy()


def _mapfile(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    options = parse(arguments[1:], "dnOsucC")
    if options.has("-C"):
        shell.mark_opaque(f"{arguments[0]} -C runs a command for each line")
    name = options.operands[0] if options.operands else "MAPFILE"
    _check_code(shell, name)
    state.variables.pop(name, None)
    state.arrays[name] = (FIELDS,)
    return state, state


def _printf(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    outcome = shell.run_program(arguments, state)
    if arguments[1:2] == ["-v"] and len(arguments) > 2:
        _check_code(shell, arguments[2])
        if not arguments[2].isidentifier():
            shell.mark_opaque("printf -v sets a variable whose name is not known")
        else:
            state.set(arguments[2], UNKNOWN if shell.output is None else (shell.output,))
        shell.output = None
    return outcome


def _let(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    for argument in arguments[1:]:
        _check_code(shell, argument)
        for name in re.findall(r"[A-Za-z_]\w*", argument):
            if any("$(" in value or "`" in value for value in state.get(name)):
                shell.mark_opaque(f"arithmetic on `{name}`, which holds code, runs it")
            state.set(name, (NUMBER,))
    return state, state


def _getopts(_: Evaluator, arguments: list[str], state: State) -> Outcome:
    for name in (*arguments[2:3], "OPTARG"):
        state.set(name, UNKNOWN)
    state.set("OPTIND", (NUMBER,))
    return state, state.copy()


def _test(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    for argument in arguments[1:]:
        _check_code(shell, argument)
    return state, state.copy()


def _leave(_: Evaluator, __: list[str], ___: State) -> Outcome:
    return None, None


def _escape(shell: Evaluator, _: list[str], state: State) -> Outcome:
    return shell.escape(state)


def _code(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    shell.mark_opaque(f"`{shown(arguments)}` changes which code later commands run")
    return state, state


def _hash(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    return _code(shell, arguments, state) if any("p" in a for a in arguments[1:] if a[:1] == "-") else (state, state)


def _enable(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    return _code(shell, arguments, state) if any("f" in a for a in arguments[1:] if a[:1] == "-") else (state, state)


def _history(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    options = parse(arguments[1:], "d")
    for path in options.operands:
        shell.judge.judge_write(Act.OVERWRITE, path, state, complete=shell.complete)
    return state, state


def _pwd(shell: Evaluator, _: list[str], state: State) -> Outcome:
    shell.output = state.cwd[0] + "\n" if len(state.cwd) == 1 and is_known(state.cwd[0]) else None
    return state, state


def _echo(shell: Evaluator, arguments: list[str], state: State) -> Outcome:
    return shell.run_program(arguments, state)


def _check_code(shell: Evaluator, argument: str) -> None:
    if "[" in argument and ("$(" in argument or "`" in argument):
        shell.mark_opaque(f"`{basename(argument)}` holds a subscript that the shell runs")


_NEUTRAL = (
    ":", "true", "false", "wait", "jobs", "bg", "fg", "disown", "ulimit", "umask", "times", "dirs", "caller",
    "type", "shopt", "suspend", "help", "compopt",
)  # fmt: skip

BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(_NEUTRAL, _neutral),
    "cd": _cd,
    "chdir": _cd,
    "pushd": _cd,
    "popd": _popd,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "command": _run_rest,
    "builtin": _run_rest,
    "exec": _run_rest,
    "trap": _trap,
    "alias": _alias,
    "unalias": _unalias,
    **dict.fromkeys(("export", "declare", "typeset", "local", "readonly"), _declare),
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "printf": _printf,
    "echo": _echo,
    "pwd": _pwd,
    "let": _let,
    "getopts": _getopts,
    "test": _test,
    "[": _test,
    "exit": _leave,
    "logout": _leave,
    **dict.fromkeys(("return", "break", "continue"), _escape),
    **dict.fromkeys(("complete", "compgen", "bind", "fc"), _code),
    "hash": _hash,
    "enable": _enable,
    "history": _history,
}
