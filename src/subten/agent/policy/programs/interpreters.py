"""Programs that run code which this policy does not read."""

from __future__ import annotations

import re

from subten.agent.policy.programs.effects import Act, Call, Effects, Program, nothing, parse
from subten.agent.policy.symbols import NAME

INTERPRETER = re.compile(
    r"(?:python|pypy|perl|ruby|irb|node|nodejs|deno|bun|php|lua|luajit|tclsh|wish|Rscript|R|julia|osascript|pwsh|"
    r"powershell|ipython|ghc|runghc|ocaml|scala|groovy|jshell|java|erl|elixir|guile|racket|sbcl|clisp|swipl|gdb|lldb|"
    r"sqlite3|psql|mysql|dc|m4|tcc|gnuplot|octave|maxima|npx|pnpx|bunx|uvx|pipx|uv|nix-shell|nix|sg|newgrp|dialog|"
    r"man|info|mutt|mail|ftp|lftp|rlwrap|entr|fd|fdfind|xdg-open|start-stop-daemon|run-parts|jobs|rpm|dpkg)[\d.]*"
)
SHELLS = frozenset(["sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "rbash", "fish", "csh", "tcsh"])
_RUNNERS = (
    "make", "gmake", "ninja", "cmake", "npm", "pnpm", "yarn", "pytest", "tox", "nox", "cargo", "go", "mvn",
    "gradle", "ant", "rake", "bundle", "meson", "bazel", "scons", "just", "task", "invoke", "pre-commit",
    "composer", "dotnet", "sbt", "mix", "rebar3", "stack", "cabal", "jest", "mocha", "vitest", "eslint", "tsc",
    "webpack", "vite", "pip",
)  # fmt: skip
_VERSION = frozenset(("--version", "-V", "--help", "-version"))
_MAKE_CODE = re.compile(r"-[fCEI]|--(?:file|makefile|eval|directory|include-dir)|[A-Za-z_]\w*[:+?!]*=")


def interpret(call: Call) -> Effects:
    """Code in an argument, a file or the input."""
    if len(call.arguments) == 1 and call.arguments[0] in _VERSION:
        return Effects()
    effects = Effects()
    effects.code.append(f"{call.name} runs code that this policy does not read")
    return effects


def _run_project(call: Call) -> Effects:
    """Code of the project; only suspicious if the same script may have written it, or names it."""
    effects = Effects()
    if call.wrote:
        effects.code.append(f"{call.name} runs code from files, and this script has written files")
    elif call.name in ("make", "gmake") and any(_MAKE_CODE.match(argument) for argument in call.arguments):
        effects.code.append(f"{call.name} runs code named in its arguments")
    return effects


def _ripgrep(call: Call) -> Effects:
    effects = Effects()
    if any(argument.startswith(("--pre", "--hostname-bin")) for argument in call.arguments):
        effects.opaque.append("rg runs a program named in its options")
    return effects


def _mktemp(call: Call) -> Effects:
    """What it makes is new, so whatever lies below is nobody's."""
    options = parse(call.arguments, "p", ("--tmpdir", "--suffix"))
    plain = not options.operands and not options.values and not options.uncertain
    return Effects(output=f"/tmp/tmp.{NAME}\n" if plain else None)


def _xxd(call: Call) -> Effects:
    return Effects().touch(Act.OVERWRITE, parse(call.arguments, "clnosg").operands[1:])


_READERS = (
    "ls", "dir", "vdir", "cat", "head", "tail", "grep", "egrep", "fgrep", "zgrep", "zcat", "bzcat", "xzcat", "wc",
    "cut", "tr", "nl", "od", "hexdump", "strings", "file", "stat", "du", "df", "ps", "pgrep", "date", "id",
    "whoami", "groups", "uname", "hostname", "arch", "pwd", "which", "whereis", "basename", "dirname", "realpath",
    "readlink", "seq", "sleep", "true", "false", "test", "[", ":", "diff", "diff3", "cmp", "comm", "join", "paste",
    "column", "fold", "fmt", "pr", "expand", "unexpand", "tac", "rev", "base32", "base64", "basenc", "md5sum",
    "sha1sum", "sha224sum", "sha256sum", "sha384sum", "sha512sum", "b2sum", "cksum", "sum", "jq", "printenv",
    "locale", "nproc", "free", "uptime", "lscpu", "lsblk", "getconf", "expr", "factor", "bc", "mkdir", "touch",
    "sync", "tty", "clear", "kill", "pkill", "killall", "yes", "echo", "printf", "numfmt", "look", "tsort",
    "getent", "lsof", "ss", "ip", "ping", "dig", "host", "nslookup", "tput", "stty", "cal", "who", "w", "last",
    "umask", "ag", "ack",
)  # fmt: skip

PROGRAMS: dict[str, Program] = {
    **{name: Program(nothing) for name in _READERS},
    **{name: Program(_run_project, monotone=False, described=False) for name in _RUNNERS},
    "rg": Program(_ripgrep, monotone=False),
    "mktemp": Program(_mktemp, monotone=False),
    "xxd": Program(_xxd, monotone=False),
}
