"""The command line. `main` is the one place where an error becomes a line on stderr and an exit code.

Exit codes: 0 success, 1 the reader of a pipe went away, 2 an error that the message explains, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from subten.cli.app import app
from subten.errors import SubtenError

INTERRUPTED = 130
BROKEN_PIPE = 1
USAGE = 2
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# click's ClickException. Recent releases of Typer carry their own copy of click under a private name.
_ClickException: Any = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are `sys.argv[1:]` by default."""
    _prepare_streams()
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="subten", standalone_mode=False)
        sys.stdout.flush()
    except SubtenError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return BROKEN_PIPE
    except OSError as error:
        # Whoever opens a file says what is wrong with it; a standard stream has no name.
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _abandon_output()
        return _complain(f"the output can't be written: {error.strerror}; send it elsewhere", USAGE)
    except _ClickException as error:
        return _complain(error.format_message(), USAGE)
    return status if isinstance(status, int) else 0


def _prepare_streams() -> None:
    """Standard streams that a caller closed lead nowhere, as the next file that is opened would take their place;
    and characters that the encoding of the output lacks are escaped, as Python does on stderr."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _abandon_output() -> None:
    """What is still buffered can't be written; the interpreter must not try at its exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, exit_code: int) -> int:
    """One line, whatever a library put into its message; where stderr can't be written, the exit code says it all."""
    with contextlib.suppress(OSError):
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
