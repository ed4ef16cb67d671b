"""Programs whose arguments are another command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from subten.agent.policy.programs.effects import Act, Call, Describe, Effects, Program, ShellText, parse
from subten.agent.policy.symbols import ANY, FIELDS, is_known

_MAX_ITEMS = 32
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


def _prefix(short: str = "", long: Sequence[str] = (), operands: int = 0) -> Program:
    """A wrapper: options, a number of operands of its own, then the command."""

    def describe(call: Call) -> Effects:
        options = parse(call.arguments, short, long, permute=False)
        effects = Effects()
        if options.uncertain and not options.operands[operands:]:
            effects.opaque.append(f"{call.name} runs a command that is not known")
        command = options.operands[operands:]
        if command:
            effects.commands.append(command)
        return effects

    return Program(describe, wraps=True)


def _env(call: Call) -> Effects:
    effects = Effects()
    arguments = list(call.arguments)
    folder = False
    while arguments:
        argument = arguments[0]
        if argument.startswith(("-S", "--split-string")) or re.match(r"-[iv0]*S", argument):
            arguments.pop(0)
            text = re.sub(r"^(--split-string=?|-[iv0]*S)", "", argument)
            if not text:
                text = arguments.pop(0) if arguments else ""
            if not is_known(text) or "$" in text or "\\" in text:
                effects.opaque.append("env -S splits a text that is not known")
                return effects
            try:
                arguments = [*shlex.split(text), *arguments]
            except ValueError:
                effects.opaque.append("env -S splits a text with unbalanced quotes")
                return effects
        elif argument in ("-u", "--unset", "-C", "--chdir", "--argv0", "-a"):
            folder = folder or argument in ("-C", "--chdir")
            del arguments[:2]
        elif argument.startswith("-"):
            folder = folder or argument.startswith(("--chdir", "-C"))
            arguments.pop(0)
        else:
            break
    assignments = []
    while arguments and _ASSIGNMENT.match(arguments[0]):
        assignments.append(arguments.pop(0))
    if folder:
        effects.opaque.append("env runs a command in another folder")
    if arguments:
        # An assignment in front of a command means the same to a shell.
        effects.commands.append([*assignments, *arguments])
    return effects


def _sudo(call: Call) -> Effects:
    options = parse(
        call.arguments,
        "ugpCrTthDRU",
        ("--user", "--group", "--prompt", "--close-from", "--chdir", "--chroot", "--host"),
        permute=False,
    )
    effects = Effects()
    if options.has("-D", "--chdir", "-R", "--chroot"):
        effects.opaque.append(f"{call.name} runs a command in another folder")
    if options.has("-e", "--edit"):
        return effects.touch(Act.OVERWRITE, options.operands)
    command = options.operands
    if options.has("-s", "--shell", "-i", "--login"):
        if not command:
            effects.opaque.append(f"{call.name} starts a shell")
        else:
            effects.scripts.append(ShellText(" ".join(command)))
    elif command:
        effects.commands.append(command)
    return effects


def _xargs(call: Call) -> Effects:
    options = parse(
        call.arguments,
        "IEeLnPsda",
        (
            "--replace",
            "--max-args",
            "--max-procs",
            "--max-chars",
            "--delimiter",
            "--arg-file",
            "--max-lines",
            "--eof",
        ),
        permute=False,
    )
    effects = Effects()
    command = options.operands or ["echo"]
    replaced = options.value("-I", "--replace") or ("{}" if options.has("-i", "--replace") else None)
    items = None
    plain = not (set(options.values) | options.flags) & {"-a", "--arg-file", "-d", "--delimiter", "-E", "-e"}
    if call.stdin is not None and is_known(call.stdin) and plain and not re.search(r"[\"'\\]", call.stdin):
        items = call.stdin.split("\0") if options.has("-0", "--null") else call.stdin.split()
    if replaced is not None:
        # Here an item is a line.
        lines = [ANY] if items is None or call.stdin is None else [line.lstrip() for line in call.stdin.splitlines()]
        for line in lines if len(lines) <= _MAX_ITEMS else [ANY]:
            effects.commands.append([argument.replace(replaced, line) for argument in command])
        return effects
    if options.uncertain:
        effects.opaque.append("xargs runs a command that is not known")
    effects.commands.append([*command, *([FIELDS] if items is None else items)])
    return effects


def _script_option(flag: str, short: str, *, operand: int | None = None) -> Program:
    """Programs with a command in one option (`su -c`), or in an operand."""

    def describe(call: Call) -> Effects:
        options = parse(call.arguments, short, ("--command",), permute=operand is None)
        effects = Effects()
        text = options.value(flag, "--command")
        if text is not None:
            effects.scripts.append(ShellText(text))
        elif operand is not None and len(options.operands) > operand:
            effects.commands.append(options.operands[operand:])
        else:
            effects.code.append(f"{call.name} starts a shell")
        return effects

    return Program(describe)


def _joined(short: str, long: Sequence[str] = ()) -> Program:
    """Programs that hand their operands, joined, to a shell."""

    def describe(call: Call) -> Effects:
        options = parse(call.arguments, short, long, permute=False)
        effects = Effects()
        if options.operands:
            effects.scripts.append(ShellText(" ".join(options.operands)))
        return effects

    return Program(describe)


def _parallel(call: Call) -> Effects:
    options = parse(call.arguments, "jaIdLnNSX", ("--jobs", "--arg-file", "--delay", "--timeout"), permute=False)
    effects = Effects()
    effects.opaque.append("parallel puts arguments into shell text that is not known")
    command = []
    for operand in options.operands:
        if operand.startswith(":::"):
            break
        command.append(operand)
    if command:
        effects.scripts.append(ShellText(" ".join(command)))
    return effects


def _elsewhere(call: Call) -> Effects:
    effects = Effects()
    effects.code.append(f"{call.name} runs commands in another place or at another time")
    return effects


def _multi(call: Call) -> Effects:
    """busybox and toybox: the first operand is the program."""
    if call.arguments[:1] and call.arguments[0].startswith("-"):
        return Effects()
    return Effects(commands=[list(call.arguments)] if call.arguments else [])


def _flock(call: Call) -> Effects:
    options = parse(
        call.arguments, "wEc", ("--timeout", "--wait", "--conflict-exit-code", "--command"), permute=False
    )
    rest = options.operands[1:]
    if rest[:1] == ["-c"] or rest[:1] == ["--command"]:
        return Effects(scripts=[ShellText(text) for text in rest[1:2]])
    return Effects(commands=[rest] if rest else [])


_OTHER_PLACES = (
    "ssh", "scp", "sftp", "docker", "podman", "nerdctl", "kubectl", "nsenter", "chroot", "systemd-run", "at",
    "batch", "crontab", "machinectl", "lxc-attach", "bwrap", "proot", "firejail", "unshare", "mount", "umount",
    "losetup", "debugfs", "mkfs", "mke2fs", "fdisk", "parted", "wipefs", "blkdiscard", "swapon", "systemctl",
    "service", "tmux", "screen", "expect", "nc", "ncat", "socat", "telnet",
)  # fmt: skip

_watch: Describe = _joined("nd", ("--interval", "--differences")).describe

PROGRAMS: dict[str, Program] = {
    "env": Program(_env, wraps=True),
    "nice": _prefix("n", ("--adjustment",)),
    "ionice": _prefix("cnpPu", ("--class", "--classdata")),
    "chrt": _prefix("TPD", (), 1),
    "taskset": _prefix("", (), 1),
    "timeout": _prefix("ks", ("--kill-after", "--signal"), 1),
    "nohup": _prefix(),
    "setsid": _prefix(),
    "stdbuf": _prefix("ioe", ("--input", "--output", "--error")),
    "unbuffer": _prefix(),
    "fakeroot": _prefix("lsib"),
    "catchsegv": _prefix(),
    "numactl": _prefix("CNmip", ("--cpunodebind", "--membind", "--physcpubind")),
    "linux32": _prefix(),
    "linux64": _prefix(),
    "setarch": _prefix("", (), 1),
    "prlimit": _prefix(),
    "runuser": _script_option("-c", "cugGs", operand=None),
    "su": _script_option("-c", "cgGsw", operand=None),
    "script": _script_option("-c", "cIOBTEmo", operand=None),
    "setpriv": _prefix(),
    "capsh": Program(_elsewhere, monotone=False),
    "time": _prefix("fo", ("--format", "--output")),
    "strace": _prefix("eoEpsau"),
    "ltrace": _prefix("eolpsau"),
    "valgrind": _prefix(),
    "dbus-run-session": _prefix(),
    "xvfb-run": _prefix("nefpsw"),
    "caffeinate": _prefix("tw"),
    "chronic": _prefix(),
    "ts": _prefix(),
    "sudo": Program(_sudo),
    "doas": Program(_sudo),
    "pkexec": Program(_sudo),
    "xargs": Program(_xargs),
    "parallel": Program(_parallel, monotone=False),
    "watch": Program(_watch, monotone=False),
    "flock": Program(_flock),
    "busybox": Program(_multi),
    "toybox": Program(_multi),
    **{name: Program(_elsewhere, monotone=False) for name in _OTHER_PLACES},
}
