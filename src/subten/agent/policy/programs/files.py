"""Programs that delete, move, overwrite and truncate."""

from __future__ import annotations

from collections.abc import Sequence

from subten.agent.policy.programs.effects import (
    Act,
    Call,
    Effects,
    Link,
    Options,
    Program,
    Touch,
    basename,
    nothing,
    parse,
)
from subten.agent.policy.symbols import ANY, FIELDS

_UNSURE = "it may get options that are not known"


def _remove(call: Call) -> Effects:
    options = parse(call.arguments)
    return Effects().touch(Act.REMOVE, options.operands, tree=True)


def _overwrite_operands(short: str = "", long: Sequence[str] = ()) -> Program:
    def describe(call: Call) -> Effects:
        return Effects().touch(Act.OVERWRITE, parse(call.arguments, short, long).operands)

    return Program(describe)


def _shred(call: Call) -> Effects:
    options = parse(call.arguments, "ns", ("--iterations", "--size", "--random-source"))
    return Effects().touch(Act.OVERWRITE, options.operands)


def _tee(call: Call) -> Effects:
    options = parse(call.arguments)
    if not call.complete:
        # `-a` may still follow.
        return Effects()
    act = Act.APPEND if options.has("-a", "--append") and not options.uncertain else Act.OVERWRITE
    return Effects(output=call.stdin).touch(act, options.operands)


def _targets(options: Options) -> tuple[list[str], str | None]:
    """Sources and destination of cp, mv, install and ln."""
    folder = options.value("-t", "--target-directory")
    if folder is not None:
        return options.operands, folder
    if len(options.operands) < 2:
        return options.operands, None
    return options.operands[:-1], options.operands[-1]


def _placed(sources: Sequence[str], destination: str, *, tree: bool) -> list[Touch]:
    """What is overwritten where sources are put to a destination, which may be a folder."""
    touches = [Touch(Act.OVERWRITE, destination)]
    for source in sources:
        name = basename(source)
        if FIELDS in source or name in ("", ".", ".."):
            name = ANY
        touches.append(Touch(Act.OVERWRITE, f"{destination.rstrip('/')}/{name}", tree))
    return touches


_COPY_LONG = ("--target-directory", "--suffix")


def _copy(call: Call) -> Effects:
    options = parse(call.arguments, "tS", _COPY_LONG)
    sources, destination = _targets(options)
    effects = Effects()
    if destination is None:
        # One operand that is not known may be several.
        return effects.touch(Act.OVERWRITE, [path for path in sources if FIELDS in path])
    effects.touches += _placed(sources, destination, tree=options.has("-r", "-R", "-a", "--recursive", "--archive"))
    if FIELDS in destination:
        effects.touches += [Touch(Act.OVERWRITE, path) for path in sources]
    if options.has("-l", "-s", "--link", "--symbolic-link", "-a", "-d", "--archive", "-P", "--no-dereference"):
        symbolic = not options.has("-l", "--link")
        if options.has("-l", "-s", "--link", "--symbolic-link"):
            effects.links += _links(sources, destination, symbolic=symbolic)
    return effects


def _links(sources: Sequence[str], destination: str, *, symbolic: bool) -> list[Link]:
    links = []
    for source in sources:
        links.append(Link(destination, source, symbolic))
        links.append(Link(f"{destination.rstrip('/')}/{basename(source) or ANY}", source, symbolic))
    return links


def _move(call: Call) -> Effects:
    options = parse(call.arguments, "tS", _COPY_LONG)
    effects = Effects()
    if not call.complete:
        # Whether the last operand is a source or the destination is open, but below a protected path both are wrong.
        effects.touch(Act.MOVE, options.operands[:1], tree=True)
        return effects.touch(Act.OVERWRITE, options.operands[1:])
    sources, destination = _targets(options)
    effects.touch(Act.MOVE, sources, tree=True)
    if destination is not None:
        effects.touches += _placed(sources, destination, tree=True)
        if FIELDS in destination:
            effects.touch(Act.MOVE, [destination], tree=True)
        for source in sources:
            # What was reached by the old name is reached by the new one.
            effects.links.append(Link(destination, source, True))
            effects.links.append(Link(f"{destination.rstrip('/')}/{basename(source) or ANY}", source, True))
    return effects


def _install(call: Call) -> Effects:
    options = parse(call.arguments, "tSgmo", (*_COPY_LONG, "--group", "--mode", "--owner", "--strip-program"))
    effects = Effects()
    if options.has("--strip-program"):
        effects.opaque.append("install runs a program of its own choice")
    if options.has("-d", "--directory"):
        return effects.touch(Act.CHANGE, options.operands)
    sources, destination = _targets(options)
    if destination is not None:
        effects.touches += _placed(sources, destination, tree=False)
    return effects


def _link(call: Call) -> Effects:
    options = parse(call.arguments, "tS", _COPY_LONG)
    sources, destination = _targets(options)
    if destination is None:
        destination = "."
    effects = Effects()
    if options.uncertain:
        effects.opaque.append(f"{call.name}: {_UNSURE}")
    if options.has("-f", "--force"):
        effects.touches += _placed(sources, destination, tree=False)
    effects.links += _links(sources, destination, symbolic=options.has("-s", "--symbolic"))
    return effects


def _plain_link(call: Call) -> Effects:
    operands = parse(call.arguments).operands
    return Effects(links=_links(operands[:1], operands[1], symbolic=False)) if len(operands) > 1 else Effects()


def _dd(call: Call) -> Effects:
    effects = Effects()
    for argument in call.arguments:
        if argument.startswith("of="):
            effects.touch(Act.OVERWRITE, [argument[3:]])
        elif FIELDS in argument or argument.startswith(ANY):
            effects.touch(Act.OVERWRITE, [ANY])
    return effects


def _attributes(call: Call) -> Effects:
    options = parse(call.arguments, "", ("--reference", "--from"))
    operands = options.operands if options.has("--reference") else options.operands[1:]
    return Effects().touch(Act.CHANGE, operands, tree=options.has("-R", "--recursive") or options.uncertain)


def _all_operands_change(call: Call) -> Effects:
    return Effects().touch(Act.CHANGE, parse(call.arguments).operands, tree=True)


def _rename(call: Call) -> Effects:
    return Effects().touch(Act.MOVE, parse(call.arguments).operands, tree=True)


def _output_option(letters: str, long: str) -> Program:
    """Programs that write only where an option says so."""

    def describe(call: Call) -> Effects:
        options = parse(call.arguments, letters, (long,))
        paths = [
            path for name in (*(f"-{letter}" for letter in letters), long) for path in options.values.get(name, ())
        ]
        if options.uncertain:
            paths.append(ANY)
        return Effects().touch(Act.OVERWRITE, paths)

    return Program(describe)


def _sort(call: Call) -> Effects:
    options = parse(
        call.arguments, "oktST", ("--output", "--key", "--field-separator", "--buffer-size", "--compress-program")
    )
    effects = Effects().touch(Act.OVERWRITE, [*options.values.get("-o", ()), *options.values.get("--output", ())])
    if options.uncertain:
        effects.touch(Act.OVERWRITE, [ANY])
    if options.has("--compress-program"):
        effects.opaque.append("sort runs a program of its own choice")
    return effects


def _second_operand(call: Call) -> Effects:
    """`uniq INPUT OUTPUT`, `split`'s prefix and the like."""
    return Effects().touch(Act.OVERWRITE, parse(call.arguments, "fsw").operands[1:])


def _compress(call: Call) -> Effects:
    options = parse(call.arguments, "SbT", ("--suffix",))
    if options.has("-l", "--list", "-t", "--test") or (
        options.has("-c", "--stdout", "--to-stdout") and not options.uncertain
    ):
        return Effects()
    if not options.operands:
        return Effects()
    return Effects().touch(Act.REMOVE, options.operands, tree=options.has("-r", "--recursive"))


def _patch(call: Call) -> Effects:
    options = parse(
        call.arguments, "pidoBDrFgVYz", ("--directory", "--input", "--output", "--strip", "--reject-file")
    )
    if options.has("--dry-run"):
        return Effects()
    folder = options.value("-d", "--directory") or "."
    effects = Effects().touch(Act.OVERWRITE, [folder], tree=False)
    effects.touch(Act.OVERWRITE, [path for path in (options.value("-o", "--output"),) if path])
    return effects.touch(Act.OVERWRITE, options.operands[:1])


def _download(call: Call) -> Effects:
    letters = "oODc" if call.name == "curl" else "OPoa"
    options = parse(
        call.arguments,
        letters + "HdXuAebFTxKmrwyYzEhtU" if call.name == "curl" else letters + "eUtTQwbBiDAR",
        ("--output", "--output-document", "--directory-prefix", "--output-dir", "--dump-header", "--cookie-jar"),
    )
    effects = Effects()
    written = ("-o", "-D", "-c", "-O", "-P", "-a") if call.name == "curl" else ("-O", "-P", "-o", "-a")
    for name in (*written, "--output", "--output-document", "--dump-header", "--cookie-jar", "--directory-prefix"):
        effects.touch(Act.OVERWRITE, options.values.get(name, ()))
    if options.has("-O", "--remote-name", "-J") or (call.name == "wget" and not options.has("-O")):
        effects.touch(Act.OVERWRITE, [options.value("-P", "--directory-prefix", "--output-dir") or "."])
    if options.uncertain:
        effects.touch(Act.OVERWRITE, [ANY])
    if options.has("-K", "--config", "--use-askpass", "-e", "--execute"):
        effects.opaque.append(f"{call.name} reads options from elsewhere")
    return effects


PROGRAMS: dict[str, Program] = {
    "rm": Program(_remove),
    "unlink": Program(_remove),
    "rmdir": Program(_remove),
    "srm": Program(_remove),
    "wipe": Program(_remove),
    "trash": Program(_remove),
    "trash-put": Program(_remove),
    "rimraf": Program(_remove),
    "shred": Program(_shred),
    "truncate": _overwrite_operands("sr", ("--size", "--reference")),
    "fallocate": _overwrite_operands("lo", ("--length", "--offset")),
    "tee": Program(_tee, monotone=False),
    "sponge": Program(_tee, monotone=False),
    "cp": Program(_copy, monotone=False),
    "mv": Program(_move),
    "install": Program(_install, monotone=False),
    "ln": Program(_link, monotone=False),
    "link": Program(_plain_link, monotone=False),
    "dd": Program(_dd),
    "chmod": Program(_attributes, monotone=False),
    "chown": Program(_attributes, monotone=False),
    "chgrp": Program(_attributes, monotone=False),
    "chattr": Program(_all_operands_change, monotone=False),
    "setfacl": Program(_all_operands_change, monotone=False),
    "setfattr": Program(_all_operands_change, monotone=False),
    "rename": Program(_rename, monotone=False),
    "prename": Program(_rename, monotone=False),
    "sort": Program(_sort),
    "shuf": _output_option("o", "--output"),
    "uniq": Program(_second_operand),
    "split": Program(_second_operand, monotone=False),
    "csplit": Program(_second_operand, monotone=False),
    "mkfifo": Program(nothing),
    "gzip": Program(_compress, monotone=False),
    "gunzip": Program(_compress, monotone=False),
    "bzip2": Program(_compress, monotone=False),
    "bunzip2": Program(_compress, monotone=False),
    "xz": Program(_compress, monotone=False),
    "unxz": Program(_compress, monotone=False),
    "zstd": Program(_compress, monotone=False),
    "unzstd": Program(_compress, monotone=False),
    "patch": Program(_patch, monotone=False),
    "curl": Program(_download, monotone=False),
    "wget": Program(_download, monotone=False),
}
