"""The command line. `main` is the one place where an error becomes a line on stderr and an exit code.

Exit codes: 0 success, 1 the reader of a pipe went away, 2 an error that the message explains, 130 interrupted.
"""

from __future__ import annotations

import contextlib
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

# click's ClickException. Recent releases of Typer carry their own copy of click under a private name.
_ClickException: Any = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are `sys.argv[1:]` by default."""
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="subten", standalone_mode=False)
        sys.stdout.flush()
    except SubtenError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered can't be written; the interpreter must not try at its exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except _ClickException as error:
        return _complain(error.format_message(), USAGE)
    return status if isinstance(status, int) else 0


def _complain(message: str, exit_code: int) -> int:
    """One line, whatever a library put into its message."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
