"""Whether a path that a command names can be one that is protected. Paths are text here: no file is looked at."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache

from subten.agent.policy.symbols import ANY, BELOW, FIELDS, SOME_BELOW, STAR, is_known, is_unknown, to_regex

_MAX_LINKS = 16
_WILD = re.compile(f"[{ANY}{FIELDS}{SOME_BELOW}]")


class Reach(IntEnum):
    """How a path stands to a protected one."""

    NO = 0
    MAYBE = 1
    ABOVE = 2
    """It is a folder above: only what acts on all that is in it matters."""
    WITHIN = 3
    """It is the protected path, or lies below."""


def absolute(path: str, cwd: str) -> str:
    """The path from the root, without `.`, `..` and repeated slashes."""
    return normalised(path if path.startswith("/") else f"{cwd}/{path}")


def normalised(path: str) -> str:
    """`..` takes the last name away, as in the shell's own `cd`. A path that is not absolute stays unknown there."""
    if path.startswith("/") and "/." not in path and "//" not in path:
        return path.rstrip("/") or "/"
    if not path.startswith("/"):
        return ANY
    names: list[str] = []
    for name in path.split("/"):
        if name == "..":
            if names and is_unknown(names[-1]):
                return ANY
            del names[-1:]
        elif name and name != ".":
            names.append(name)
    return "/" + "/".join(names)


def followed(path: str, links: Mapping[str, str]) -> str:
    """The path after the links that the script itself made. `path` is absolute and normalised."""
    if not links:
        return path
    for _ in range(_MAX_LINKS):
        for link, target in links.items():
            if is_unknown(link):
                return ANY
            if path == link or path.startswith(f"{link}/"):
                path = normalised(target + path[len(link) :])
                break
        else:
            return path
    return ANY


@lru_cache(maxsize=4096)
def reach(path: str, protected: str) -> Reach:
    """How an absolute, normalised path, which may hold symbols, stands to a protected one."""
    if is_known(path):
        if path == protected or path.startswith(protected.rstrip("/") + "/"):
            return Reach.WITHIN
        if protected.startswith(path.rstrip("/") + "/"):
            return Reach.ABOVE
        if not path.isascii():
            plain = "".join(c for c in unicodedata.normalize("NFKC", path) if unicodedata.category(c) != "Cf")
            if plain != path and reach(normalised(plain), protected) is not Reach.NO:
                return Reach.MAYBE
        return Reach.NO
    wild = _WILD.search(path)
    if wild:
        return _unknown_reach(path, wild.start(), protected)
    if path.endswith(BELOW):
        base = reach(path.removesuffix(BELOW).rstrip("/") or "/", protected)
        return Reach.WITHIN if base is not Reach.NO else Reach.NO
    if BELOW in path:
        return _found_reach(path, protected)
    return _pattern_reach(path, protected)


def _pattern_reach(path: str, protected: str) -> Reach:
    """Name by name; a pattern never matches a slash."""
    names = [name for name in path.split("/") if name]
    wanted = [name for name in protected.split("/") if name]
    for name, want in zip(names, wanted, strict=False):
        if is_known(name):
            if name != want:
                return Reach.NO
        elif not re.fullmatch(to_regex(name, slashes=False), want, re.DOTALL):
            return Reach.NO
        elif name[0] == STAR and want[0] == ".":
            return Reach.MAYBE
    return Reach.WITHIN if len(names) >= len(wanted) else Reach.ABOVE


def _unknown_reach(path: str, position: int, protected: str) -> Reach:
    """Known up to `position`. What follows may climb with `..`, unless it is what a walk through a folder found."""
    if path[position] == SOME_BELOW:
        base = path[:position].rstrip("/") or "/"
        found = reach(base, protected)
        if found is Reach.ABOVE:
            return Reach.MAYBE
        return Reach.WITHIN if found is Reach.WITHIN else found
    head = path[:position]
    if is_known(head) and head.endswith("/") and len(head) > 1:
        # Whatever is named there lies below, or climbs out on purpose.
        return Reach.WITHIN if reach(normalised(head), protected) is Reach.WITHIN else Reach.MAYBE
    return Reach.MAYBE


def _found_reach(path: str, protected: str) -> Reach:
    """What a walk finds under one name: the protected path or a folder above it, or something else below."""
    start, _, tail = path.partition(BELOW)
    base = reach(start.rstrip("/") or "/", protected)
    if base is not Reach.ABOVE:
        return base
    name = re.compile(to_regex(tail.strip("/"), slashes=False), re.DOTALL)
    below = protected[len(start.rstrip("/")) :].strip("/").split("/")
    return Reach.WITHIN if any(name.fullmatch(part) for part in below) else Reach.MAYBE
