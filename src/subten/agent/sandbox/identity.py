"""Who a sandbox runs as, and what it is called."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil

_FIRST_USER = 1_850_000_000
_USERS = 20_000_000
_numbers = itertools.count()


def new_name() -> str:
    """A name that no other clone has."""
    return f"clone-{secrets.token_hex(4)}"


def new_user() -> int | None:
    """A user and group id that nobody else has, where this process is root; None where it can't become another user.

    The ids are above those of people and services, and differ between processes that run at the same time.
    """
    if os.geteuid() != 0:
        return None
    return _FIRST_USER + (os.getpid() * 64 + next(_numbers)) % _USERS


def as_user(user: int | None) -> list[str]:
    """The beginning of a command line: become that user, give up all groups and the way to more rights."""
    if user is None:
        return []
    setpriv = shutil.which("setpriv") or "setpriv"
    return [setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--"]
