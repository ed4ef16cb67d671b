"""Which of two versions is newer."""

import re

_FORM = re.compile(r"(\d+(?:\.\d+)*)(?:rc(\d+))?")


def key(version: str) -> tuple:
    """What versions are sorted by."""
    match = _FORM.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is no version")
    release = tuple(match[1].split("."))
    candidate = int(match[2]) if match[2] else 0
    return release, candidate


def newest(versions: list) -> str:
    """The newest of some versions."""
    return max(versions, key=key)


def is_update(installed: str, offered: str) -> bool:
    """Whether what is offered is newer."""
    return key(offered) > key(installed)
