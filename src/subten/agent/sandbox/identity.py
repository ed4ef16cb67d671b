"""Who a sandbox runs as, and what it is called."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Sequence

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


def as_user(user: int | None, groups: Sequence[int] = (), dies_with_parent: bool = False) -> list[str]:
    """The beginning of a command line: become that user and give up the way to more rights.

    Args:
        user: see `new_user`; None stays who it is.
        groups: the groups it is in besides its own.
        dies_with_parent: it is killed when the thread ends that starts it.
    """
    options = ["--no-new-privs"]
    if user is not None:
        options += [f"--reuid={user}", f"--regid={user}"]
        options += [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    if dies_with_parent:
        options.append("--pdeathsig=KILL")
    return [shutil.which("setpriv") or "setpriv", *options, "--"]
