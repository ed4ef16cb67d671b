"""tree-sitter-bash as a second opinion: what it takes for a command must be one for the first parser, too.

An attack on a policy is often an attack on its parser. Two that were written apart rarely make the same mistake.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from subten.errors import ExtraMissingError

if TYPE_CHECKING:
    from tree_sitter import Parser, Query, QueryCursor


@cache
def _tools() -> tuple[Parser, Query, type[QueryCursor]]:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser, Query, QueryCursor
    except ImportError as error:
        raise ExtraMissingError(
            "judging shell commands needs tree-sitter-bash; install it with: pip install 'subten[agent]'"
        ) from error
    language = Language(tree_sitter_bash.language())
    return Parser(language), Query(language, "(command) @command"), QueryCursor


def require() -> None:
    """Load the parser.

    Raises:
        ExtraMissingError: it is not installed.
    """
    _tools()


def command_starts(text: str) -> set[int] | None:
    """Character offsets at which a simple command begins; None if the text has errors for this parser."""
    parser, query, cursor = _tools()
    data = text.encode("utf-8")
    root = parser.parse(data).root_node
    if root.has_error:
        return None
    starts = {node.start_byte for node in cursor(query).captures(root).get("command", ())}
    if len(data) == len(text):
        return starts
    return {len(data[:start].decode("utf-8")) for start in starts}
