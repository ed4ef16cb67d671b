"""Reading a policy file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subten.agent.policy.conditions import CelCondition
from subten.agent.policy.decision import Verdict
from subten.agent.policy.imports import check_examples, claude_settings, prefix_rules, wildcard
from subten.agent.policy.policy import Policy
from subten.agent.policy.rules import Rule
from subten.errors import ExtraMissingError, PolicyError

_KEYS = ("rules", "protect_paths", "default", "opaque")
_VERDICTS = {verdict.word: verdict for verdict in Verdict}
_RULE_KEYS = (*_VERDICTS, "import", "reason", "when", "match", "not_match")
_LINE = "__line__"


def load_policy(path: Path) -> Policy:
    """The policy of a YAML file with the keys `rules`, `protect_paths`, `default` and `opaque`, one of them at least.

    Raises:
        PolicyError: it can't be read, says nothing, has other keys or values, or a rule contradicts its examples;
            with the line.
        ExtraMissingError: PyYAML, or the package for conditions, is not installed.
    """
    content = _read_yaml(path)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise PolicyError(f"{path}: a policy has the keys {', '.join(_KEYS)}")
    content.pop(_LINE, None)
    for key in content:
        if key not in _KEYS:
            raise PolicyError(f"{path}: `{key}` is no key of a policy; it may have {', '.join(_KEYS)}")
    paths = content.get("protect_paths") or []
    if not isinstance(paths, list) or not all(isinstance(item, str) for item in paths):
        raise PolicyError(f"{path}: protect_paths must be a list of absolute paths")
    rules = content.get("rules") or []
    if not isinstance(rules, list):
        raise PolicyError(f"{path}: rules must be a list, each item with deny, ask, allow or import")
    read = tuple(rule for item in rules for rule in _rules(item, path))
    if not (read or paths or "default" in content or "opaque" in content):
        raise PolicyError(
            f"{path}: the policy says nothing, so it would allow all that is known; it needs rules, protect_paths, "
            "default or opaque (`default: allow` where that is meant)"
        )
    return Policy(
        rules=read,
        protect_paths=tuple(paths),
        default=_verdict(content, "default", Verdict.ALLOW, path),
        opaque=_verdict(content, "opaque", Verdict.ASK, path),
    )


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ExtraMissingError("a policy file needs PyYAML; install it with: pip install 'subten[agent]'") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Keeps the line of every mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise PolicyError(f"{path}:{key_node.start_mark.line + 1}: `{key}` is there twice")
                seen.add(key)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            mapping[_LINE] = node.start_mark.line + 1
            return mapping

    try:
        return yaml.load(_read(path), Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PolicyError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: not valid YAML: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _verdict(content: Mapping[str, Any], key: str, otherwise: Verdict, path: Path) -> Verdict:
    value = content.get(key, otherwise.word)
    if value not in _VERDICTS:
        raise PolicyError(f"{path}: {key} is {value!r}; it must be allow, ask or deny")
    return _VERDICTS[value]


def _rules(item: Any, path: Path) -> list[Rule]:
    """The rules of one item of `rules`."""
    if not isinstance(item, dict):
        raise PolicyError(f"{path}: the rule {item!r} must begin with deny:, ask:, allow: or import:")
    where = f"{path}:{item.pop(_LINE)}"
    for key in item:
        if key not in _RULE_KEYS:
            raise PolicyError(f"{where}: `{key}` is no key of a rule; it may have {', '.join(_RULE_KEYS)}")
    kinds = [key for key in (*_VERDICTS, "import") if key in item]
    if len(kinds) != 1:
        raise PolicyError(f"{where}: a rule has exactly one of deny, ask, allow and import")
    kind = kinds[0]
    if kind == "import":
        return _imported(path, _text(item, "import", where), where)
    patterns = item[kind] if isinstance(item[kind], list) else [item[kind]]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise PolicyError(f"{where}: {kind} must be a command with wildcards, such as git push *, or a list of them")
    examples = {key: _examples(item, key, where) for key in ("match", "not_match")}
    condition = CelCondition(_text(item, "when", where), where) if "when" in item else None
    reason = _text(item, "reason", where) if "reason" in item else ""
    rules: list[Rule] = []
    for text in patterns:
        pattern = wildcard(text, where)
        check_examples(pattern, examples["match"], examples["not_match"], where, f"`{text}`")
        rules.append(Rule(_VERDICTS[kind], f"{kind}: {text}", pattern, reason, condition))
    return rules


def _imported(path: Path, name: str, where: str) -> list[Rule]:
    source = path.parent / name
    if source.suffix not in (".json", ".rules"):
        raise PolicyError(
            f"{where}: '{name}' can't be imported; that takes a .json file of settings or a .rules file"
        )
    text = _read(source)
    return claude_settings(source, text) if source.suffix == ".json" else prefix_rules(source, text)


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item[key]
    if not isinstance(value, str) or not value:
        raise PolicyError(f"{where}: {key} must be a text")
    return value


def _examples(item: Mapping[str, Any], key: str, where: str) -> list[list[str]]:
    values = item.get(key, [])
    values = values if isinstance(values, list) else [values]
    examples: list[list[str]] = []
    for value in values:
        try:
            tokens = shlex.split(value) if isinstance(value, str) else []
        except ValueError as error:
            raise PolicyError(f"{where}: the example {value!r} has unbalanced quotes") from error
        if not tokens:
            raise PolicyError(f"{where}: an example under {key} must be a command, not {value!r}")
        examples.append(tokens)
    return examples
