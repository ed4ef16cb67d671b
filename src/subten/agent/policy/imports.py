"""Rules in the forms of other agents: lists of `Bash(...)` and files of `prefix_rule(...)`."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

from subten.agent.policy.decision import Verdict
from subten.agent.policy.rules import Match, Pattern, PrefixPattern, Rule, WildcardPattern
from subten.errors import PolicyError

_BASH = re.compile(r"Bash\((.*)\)", re.DOTALL)
_DECISIONS = {"allow": Verdict.ALLOW, "prompt": Verdict.ASK, "forbidden": Verdict.DENY}
_PREFIX_KEYS = ("pattern", "decision", "match", "not_match", "justification")


def wildcard(text: str, where: str) -> WildcardPattern:
    """The pattern of `Bash(cmd *)`, or of `cmd *` without the frame.

    Raises:
        PolicyError: it is empty, or about another tool.
    """
    match = _BASH.fullmatch(text.strip())
    inner = match.group(1) if match else text.strip()
    if text.strip() == "Bash":
        inner = "*"
    if not inner or (not match and re.fullmatch(r"[A-Z]\w+\(.*\)", inner)):
        raise PolicyError(f"{where}: '{text}' is no rule about commands; one looks like Bash(git push *)")
    return WildcardPattern(inner)


def check_examples(
    pattern: Pattern, match: list[list[str]], not_match: list[list[str]], where: str, name: str
) -> None:
    """Examples of what a rule is and is not about.

    Raises:
        PolicyError: one is wrong.
    """
    for example in match:
        if pattern.match(example, complete=True) is not Match.YES:
            raise PolicyError(f"{where}: {name} does not match its example '{shlex.join(example)}'")
    for example in not_match:
        if pattern.match(example, complete=True) is not Match.NO:
            raise PolicyError(f"{where}: {name} matches '{shlex.join(example)}', which its examples say it must not")


def claude_settings(path: Path, text: str) -> list[Rule]:
    """The rules about commands in a `settings.json` with `permissions: {allow, ask, deny}`; other tools are left out.

    Raises:
        PolicyError: it is not such a file.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    permissions = content.get("permissions") if isinstance(content, dict) else None
    if not isinstance(permissions, dict):
        raise PolicyError(f"{path}: it has no object `permissions` with lists allow, ask and deny")
    rules: list[Rule] = []
    for verdict in Verdict:
        entries = permissions.get(verdict.word, [])
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise PolicyError(f"{path}: permissions.{verdict.word} must be a list of texts such as Bash(git push *)")
        for entry in entries:
            if entry == "Bash" or _BASH.fullmatch(entry.strip()):
                line = _line_of(text, entry)
                rules.append(Rule(verdict, entry, wildcard(entry, f"{path}:{line}")))
    return rules


def _line_of(text: str, entry: str) -> int:
    return text.count("\n", 0, max(text.find(json.dumps(entry)), 0)) + 1


def prefix_rules(path: Path, text: str) -> list[Rule]:
    """The rules of a file of `prefix_rule(pattern = [...], decision = "...", match = [...], not_match = [...])`.

    A pattern is a list of tokens; a list in it holds alternatives. Examples are texts or lists of tokens.

    Raises:
        PolicyError: something else stands in it, or an example is wrong; with the line.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise PolicyError(f"{path}:{line}: not a file of prefix_rule(...) calls") from error
    return [_prefix_rule(statement, f"{path}:{statement.lineno}") for statement in tree.body]


def _prefix_rule(statement: ast.stmt, where: str) -> Rule:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "prefix_rule":
        raise PolicyError(f"{where}: only prefix_rule(...) may stand in a rule file")
    if call.args or any(keyword.arg not in _PREFIX_KEYS for keyword in call.keywords):
        raise PolicyError(f"{where}: prefix_rule takes {', '.join(_PREFIX_KEYS)}, each by name")
    values: dict[str, Any] = {}
    lines: dict[str, list[int]] = {}
    for keyword in call.keywords:
        name = str(keyword.arg)
        try:
            values[name] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise PolicyError(f"{where}: `{name}` must be written out, without computation") from error
        if isinstance(keyword.value, ast.List):
            lines[name] = [element.lineno for element in keyword.value.elts]
    pattern = PrefixPattern(_tokens(values.get("pattern"), where))
    decision = values.get("decision", "allow")
    if decision not in _DECISIONS:
        raise PolicyError(f"{where}: decision is {decision!r}; it must be allow, prompt or forbidden")
    name = f"prefix_rule({' '.join('|'.join(alternatives) for alternatives in pattern.tokens)})"
    path = where.rpartition(":")[0]
    for key in ("match", "not_match"):
        examples = values.get(key, [])
        if not isinstance(examples, list):
            raise PolicyError(f"{where}: `{key}` must be a list of examples")
        for example, line in zip(examples, lines.get(key, []), strict=True):
            tokens = [_example(example, f"{path}:{line}")]
            matching, other = (tokens, []) if key == "match" else ([], tokens)
            check_examples(pattern, matching, other, f"{path}:{line}", name)
    return Rule(_DECISIONS[decision], name, pattern, str(values.get("justification") or ""))


def _tokens(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or not value:
        raise PolicyError(f"{where}: pattern must be a list of tokens, such as ['git', ['push', 'fetch']]")
    tokens: list[tuple[str, ...]] = []
    for token in value:
        alternatives = token if isinstance(token, list) else [token]
        if not alternatives or not all(isinstance(text, str) for text in alternatives):
            raise PolicyError(f"{where}: a token of a pattern must be a text or a list of texts, not {token!r}")
        tokens.append(tuple(alternatives))
    return tuple(tokens)


def _example(value: Any, where: str) -> list[str]:
    if isinstance(value, list) and value and all(isinstance(token, str) for token in value):
        return value
    if isinstance(value, str):
        try:
            tokens = shlex.split(value)
        except ValueError as error:
            raise PolicyError(f"{where}: the example {value!r} has unbalanced quotes") from error
        if tokens:
            return tokens
    raise PolicyError(f"{where}: an example must be a command, as text or as a list of tokens, not {value!r}")
