"""git, as far as it changes the working tree or runs programs of the user's choice."""

from __future__ import annotations

from subten.agent.policy.programs.effects import Act, Call, Effects, Program, parse
from subten.agent.policy.symbols import ANY, is_known

_GLOBAL_VALUES = ("-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env")
_READS = frozenset((
    "status", "log", "diff", "show", "blame", "grep", "ls-files", "ls-tree", "ls-remote", "rev-parse", "rev-list",
    "describe", "shortlog", "cat-file", "for-each-ref", "name-rev", "merge-base", "count-objects", "var", "version",
    "help", "show-ref", "symbolic-ref", "whatchanged", "cherry", "reflog", "fsck", "verify-commit", "verify-tag",
    "check-ignore", "check-attr", "annotate", "range-diff", "diff-tree", "diff-index", "diff-files", "archive",
    "bundle",
))  # fmt: skip
_RECORDS = frozenset((
    "add", "commit", "fetch", "push", "tag", "branch", "remote", "init", "notes", "gc", "repack", "prune",
    "pack-refs",
))  # fmt: skip
_REWRITES = frozenset((
    "clean", "checkout", "reset", "restore", "switch", "stash", "rm", "mv", "merge", "rebase", "pull",
    "cherry-pick", "revert", "am", "apply", "read-tree", "checkout-index", "worktree", "submodule",
    "sparse-checkout", "clone",
))  # fmt: skip
_RUNS = ("--upload-pack", "--receive-pack", "--exec", "-x", "--open-files-in-pager", "-O", "--ext-diff", "--textconv")


def _git(call: Call) -> Effects:
    arguments = list(call.arguments)
    effects = Effects()
    folder = "."
    while arguments and arguments[0].startswith("-"):
        option, equals, value = arguments.pop(0).partition("=")
        if option in ("--version", "--help", "-v", "-h"):
            return effects
        if option in _GLOBAL_VALUES and not equals:
            value = arguments.pop(0) if arguments else ANY
        if option in ("-c", "--config-env", "--exec-path"):
            effects.opaque.append(f"`git {option}` can name programs to run")
        elif option == "-C":
            folder = value if value.startswith("/") or folder == "." else f"{folder}/{value}"
        elif option == "--work-tree":
            folder = value
    if not arguments:
        return effects
    command, rest = arguments[0], arguments[1:]
    options = parse(rest, "mFCbu")
    if not is_known(command):
        effects.opaque.append("git's subcommand is not known")
    elif command == "config":
        if len(options.operands) > 1 or options.flags & {"--add", "--replace-all", "-e", "--edit", "-f", "--file"}:
            effects.opaque.append("git's configuration can name programs to run")
    elif command in _REWRITES:
        _rewrite(effects, command, folder, rest)
    elif command not in _READS and command not in _RECORDS:
        effects.code.append(f"`git {command}` may run a program of the user's configuration")
    if options.has(*_RUNS) and command not in ("clean", "cherry-pick", "revert"):
        effects.opaque.append(f"`git {command}` runs a program named in its options")
    if command == "archive" or command == "bundle" or "--output" in options.values:
        outputs = [*options.values.get("--output", ())]
        outputs += [rest[i + 1] for i, word in enumerate(rest[:-1]) if word in ("-o", "--output")]
        effects.touch(Act.OVERWRITE, outputs)
    return effects


def _rewrite(effects: Effects, command: str, folder: str, rest: list[str]) -> None:
    options = parse(rest, "mb")
    if command == "clone":
        effects.touch(Act.OVERWRITE, options.operands[1:] or [f"{folder}/{ANY}"])
        return
    if command == "stash" and options.operands[:1] and options.operands[0] in ("list", "show"):
        return
    if command == "worktree" and options.operands[:1] == ["list"]:
        return
    if command == "submodule" and options.operands[:1] == ["status"]:
        return
    if command in ("worktree", "submodule") and options.operands[:1] == ["foreach"]:
        effects.opaque.append("`git submodule foreach` runs a command")
    if command == "clean" and options.has("-n", "--dry-run"):
        return
    if command == "rebase" and options.has("-x", "--exec", "-i", "--interactive"):
        effects.opaque.append("git rebase runs commands or an editor")
    if command == "rm" and options.has("--cached"):
        return
    # Paths among the operands, all under the folder; the repository may also begin further up.
    act = Act.REMOVE if command in ("clean", "rm") else Act.OVERWRITE
    effects.touch(act, [folder], tree=True)
    if command in ("mv", "rm", "worktree", "checkout", "restore", "clean"):
        paths = [path if path.startswith("/") else f"{folder}/{path}" for path in options.operands]
        effects.touch(Act.MOVE if command == "mv" else act, paths, tree=True)


PROGRAMS: dict[str, Program] = {"git": Program(_git, monotone=False)}
