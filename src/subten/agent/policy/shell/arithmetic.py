"""Arithmetic whose numbers are known; everything else is some number."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from subten.agent.policy.symbols import NUMBER

_MAX_DIGITS = 60
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[\d\s+\-*/%()]+")

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


def names_in(expression: str) -> set[str]:
    """The variables that an expression mentions."""
    return set(_NAME.findall(expression))


def evaluate(expression: str, variables: dict[str, str]) -> str:
    """The value as decimal digits, or the symbol of an unknown number."""
    text = _NAME.sub(lambda match: f"({variables.get(match.group(), NUMBER)})", expression)
    if len(text) > _MAX_DIGITS or not _PLAIN.fullmatch(text):
        return NUMBER
    try:
        return str(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return NUMBER


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a number")
