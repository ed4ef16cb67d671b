"""Programs that write many files at once: tar, unzip, cpio, rsync."""

from __future__ import annotations

from subten.agent.policy.programs.effects import Act, Call, Effects, Program, parse
from subten.agent.policy.symbols import ANY

_TAR_LONG = (
    "--file",
    "--directory",
    "--exclude",
    "--transform",
    "--to-command",
    "--checkpoint-action",
    "--use-compress-program",
    "--info-script",
    "--new-volume-script",
    "--rsh-command",
    "--files-from",
    "--strip-components",
    "--one-top-level",
    "--listed-incremental",
)
_TAR_RUNS = (
    "--to-command",
    "--checkpoint-action",
    "--use-compress-program",
    "--info-script",
    "--new-volume-script",
    "--rsh-command",
    "-I",
    "-F",
)


def _tar(call: Call) -> Effects:
    arguments = list(call.arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = "-" + arguments[0]
    options = parse(arguments, "fCXTIFgbHKLNV", _TAR_LONG)
    effects = Effects()
    if options.uncertain:
        effects.opaque.append("tar may get options that are not known")
    if options.has(*_TAR_RUNS) and not (set(options.flags) & {"--to-stdout"} and not options.has(*_TAR_RUNS)):
        effects.opaque.append("tar runs a program named in its options")
    folders = [*options.values.get("-C", ()), *options.values.get("--directory", ())]
    files = [*options.values.get("-f", ()), *options.values.get("--file", ())]
    if options.has("-x", "--extract", "--get"):
        if not options.has("-O", "--to-stdout"):
            # An archive may hold any name below; with -P any name at all.
            for folder in folders or ["."]:
                effects.touch(Act.OVERWRITE, [folder, f"{folder}/{ANY}"], tree=True)
            if options.has("-P", "--absolute-names"):
                effects.touch(Act.OVERWRITE, [ANY])
    elif options.has("-c", "--create"):
        effects.touch(Act.OVERWRITE, files)
    elif options.has("-r", "-u", "-A", "--append", "--update", "--concatenate", "--delete"):
        effects.touch(Act.APPEND, files)
    if options.has("--remove-files"):
        effects.touch(Act.REMOVE, options.operands, tree=True)
        effects.touch(Act.REMOVE, folders, tree=True)
    return effects


def _unzip(call: Call) -> Effects:
    options = parse(call.arguments, "dxP")
    if options.has("-l", "-t", "-v", "-Z", "-z", "-p", "-c") and not options.uncertain:
        return Effects()
    folder = options.value("-d") or "."
    return Effects().touch(Act.OVERWRITE, [folder, f"{folder}/{ANY}"], tree=True)


def _zip(call: Call) -> Effects:
    options = parse(call.arguments, "bntxi")
    effects = Effects().touch(Act.APPEND, options.operands[:1])
    if options.has("-T", "--unzip-command", "-TT"):
        effects.opaque.append("zip may run a program of its own choice")
    if options.has("-m", "--move") or options.uncertain:
        effects.touch(Act.REMOVE, options.operands[1:], tree=True)
    return effects


def _cpio(call: Call) -> Effects:
    options = parse(call.arguments, "DEFHIO", ("--directory", "--file"))
    effects = Effects()
    if options.has("-i", "--extract", "-p", "--pass-through") or options.uncertain:
        folder = options.value("-D", "--directory") or "."
        effects.touch(Act.OVERWRITE, [ANY, folder, *options.operands], tree=True)
    return effects.touch(Act.OVERWRITE, [*options.values.get("-O", ()), *options.values.get("-F", ())])


def _rsync(call: Call) -> Effects:
    options = parse(
        call.arguments,
        "efTBM",
        ("--rsh", "--exclude", "--include", "--filter", "--files-from", "--log-file", "--rsync-path", "--backup-dir"),
    )
    effects = Effects()
    if options.has("-e", "--rsh", "--rsync-path") or options.uncertain:
        effects.opaque.append("rsync may run a program named in its options")
    if options.has("-n", "--dry-run") and not options.uncertain:
        return effects
    effects.touch(Act.OVERWRITE, options.values.get("--log-file", ()))
    if len(options.operands) > 1:
        destination = options.operands[-1]
        deletes = any(flag.startswith("--del") for flag in options.flags)
        effects.touch(Act.REMOVE if deletes else Act.OVERWRITE, [destination], tree=True)
        if any(flag.startswith("--remove-s") for flag in options.flags):
            effects.touch(Act.REMOVE, options.operands[:-1], tree=True)
    return effects


PROGRAMS: dict[str, Program] = {
    "tar": Program(_tar, monotone=False),
    "bsdtar": Program(_tar, monotone=False),
    "unzip": Program(_unzip, monotone=False),
    "zip": Program(_zip, monotone=False),
    "7z": Program(_unzip, monotone=False),
    "cpio": Program(_cpio, monotone=False),
    "rsync": Program(_rsync, monotone=False),
}
