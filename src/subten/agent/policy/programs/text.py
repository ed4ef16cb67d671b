"""sed and awk: programs in small languages of their own, which can write files and run commands."""

from __future__ import annotations

import re

from subten.agent.policy.programs.effects import Act, Call, Effects, Program, parse
from subten.agent.policy.symbols import ANY, is_known

_SED_LONG = ("--expression", "--file", "--line-length", "--separator")
_SED_ADDRESS = re.compile(
    r"(?:\d+(?:~\d+)?|\$|/(?:[^/\\\n]|\\.)*/[IM]*)(?:,[+~]?(?:\d+|\$|/(?:[^/\\\n]|\\.)*/[IM]*))?\s*!?\s*"
)
_SED_PLAIN = re.compile(
    r"[pdqQDPNGHhgxnlz=]\s*\d*|[bt]\s*\w*|:\s*\w+|[aic]\\?[^\n]*|y/(?:[^/\\]|\\.)*/(?:[^/\\]|\\.)*/"
)


def harmless_sed(script: str) -> bool:
    """Whether a sed script neither writes files nor runs commands. False where that can't be told."""
    position = 0
    while position < len(script):
        character = script[position]
        if character in " \t\n;{}":
            position += 1
            continue
        if character == "#":
            position = len(script) if "\n" not in script[position:] else script.index("\n", position)
            continue
        address = _SED_ADDRESS.match(script, position)
        if address:
            position = address.end()
            if position < len(script) and script[position] == "{":
                continue
        if script.startswith("s", position):
            end = _substitution_end(script, position + 1)
            if end is None:
                return False
            position = end
            continue
        plain = _SED_PLAIN.match(script, position)
        if not plain:
            return False
        position = plain.end()
    return True


def _substitution_end(script: str, position: int) -> int | None:
    """Behind `s/a/b/flags`; None if it isn't one, or if a flag writes or runs."""
    if position >= len(script) or script[position] in "\\\n":
        return None
    delimiter = script[position]
    position += 1
    for _ in range(2):
        while position < len(script) and script[position] != delimiter:
            position += 2 if script[position] == "\\" else 1
        if position >= len(script):
            return None
        position += 1
    flags = re.compile(r"[gpiIM0-9]*").match(script, position)
    assert flags is not None  # it may be empty
    end = flags.end()
    return end if end == len(script) or script[end] in " \t\n;}" else None


def _sed(call: Call) -> Effects:
    # -i takes its suffix only in the same word, so for option parsing it is a flag.
    arguments = [re.sub(r"^(-[nErsuz]*i).+", r"\1", a) if re.match(r"-[nErsuz]*i", a) else a for a in call.arguments]
    options = parse(arguments, "efl", _SED_LONG)
    effects = Effects()
    scripts = [*options.values.get("-e", ()), *options.values.get("--expression", ())]
    files = options.operands
    if not scripts and not options.has("-f", "--file"):
        scripts, files = files[:1], files[1:]
    if options.uncertain or not all(map(is_known, scripts)) or options.has("-f", "--file"):
        effects.opaque.append("sed runs a script that is not known")
    elif not all(map(harmless_sed, scripts)):
        effects.opaque.append("sed's script may write files or run commands")
    if options.has("-i", "--in-place"):
        effects.touch(Act.OVERWRITE, files)
    return effects


_AWK_STRING_OR_REGEX = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|(?<=[(,~!&|{;\n])\s*/(?:[^/\\\n]|\\.)*/|^\s*/(?:[^/\\\n]|\\.)*/'
)
_AWK_UNSAFE = re.compile(r"\bsystem\b|\bgetline\b|@|(?<!\|)\|(?!\|)|\bclose\b|\bfflush\b")
_AWK_PRINT = re.compile(r"\bprintf?\b[^;}\n]*>")


def harmless_awk(program: str) -> bool:
    """Whether an awk program neither writes files nor runs commands. False where that can't be told."""
    bare = _AWK_STRING_OR_REGEX.sub(" 0 ", program)
    return not (_AWK_UNSAFE.search(bare) or _AWK_PRINT.search(bare) or '"' in bare)


def _awk(call: Call) -> Effects:
    options = parse(call.arguments, "Fvf", ("--field-separator", "--assign", "--file"), permute=False)
    safe = {"-F", "-v", "--field-separator", "--assign"}
    effects = Effects()
    program = options.operands[:1]
    if options.flags - safe or options.uncertain or not program or not is_known(program[0]):
        effects.opaque.append(f"{call.name} runs a program that is not known")
    elif not harmless_awk(program[0]):
        effects.opaque.append(f"the program of {call.name} may write files or run commands")
    return effects


def _echo(call: Call) -> Effects:
    words = list(call.arguments)
    newline, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        newline = "" if "n" in words[0] else newline
        escapes = escapes or "e" in words[0]
        words.pop(0)
    text = " ".join(words) + newline
    # dash's echo always replaces escapes; what depends on the shell is not known.
    return Effects(output=text if is_known(text) and "\\" not in text else None)


def _printf(call: Call) -> Effects:
    words = list(call.arguments)
    if words[:1] == ["-v"]:
        words = words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or not all(map(is_known, words)) or "\\" in "".join(words[1:]):
        return Effects()
    text = words[0].replace("\\n", "\n").replace("\\t", "\t")
    values = words[1:]
    if "\\" in text or re.search(r"%[^s%]", text):
        return Effects()
    count = text.replace("%%", "").count("%s")
    rounds = max(1, -(-len(values) // count)) if count else 1
    values += [""] * (rounds * count - len(values))
    remaining = iter(values)
    printed = [
        re.sub(r"%[s%]", lambda match: "%" if match.group() == "%%" else next(remaining), text) for _ in range(rounds)
    ]
    return Effects(output="".join(printed))


def _cat(call: Call) -> Effects:
    operands = [argument for argument in call.arguments if argument != "-"]
    return Effects(output=None if operands else call.stdin)


def _edit(call: Call) -> Effects:
    effects = Effects()
    effects.code.append(f"{call.name} is an editor: what it does is not known before it runs")
    return effects.touch(Act.OVERWRITE, parse(call.arguments, "c").operands or [ANY])


PROGRAMS: dict[str, Program] = {
    "sed": Program(_sed, monotone=False),
    "gsed": Program(_sed, monotone=False),
    "awk": Program(_awk),
    "gawk": Program(_awk),
    "mawk": Program(_awk),
    "nawk": Program(_awk),
    "echo": Program(_echo),
    "printf": Program(_printf),
    "cat": Program(_cat),
    **{name: Program(_edit, monotone=False) for name in ("vi", "vim", "nvim", "ex", "ed", "emacs", "nano", "red")},
}
