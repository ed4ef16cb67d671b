"""A Model Context Protocol server: judging commands and running them apart, as tools for any agent that speaks it.

`validate_command` runs nothing. `run_in_sandbox` runs what the policy allows, each time in a clone of its own that
is thrown away afterwards; what it changed comes back as a diff. Nothing is ever run on the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import anyio
import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from subten import __version__
from subten.agent.policy import Decision, Policy, Verdict, judge
from subten.agent.sandbox import Clone, Limits, MicroVMTemplate, Pool, ProcessTemplate, Template, require_clones
from subten.agent.sandbox.guest.agent import WORKSPACE
from subten.errors import ParameterError, SandboxError, SubtenError

MAX_COMMAND_BYTES = (1 << 17) - 1
"""Linux takes no longer text as one argument of a program."""
MAX_SECONDS = 600.0
MAX_FILES, MAX_FILES_BYTES = 1000, 8 << 20
MAX_DIFF = 1 << 18
_OUTPUT_BYTES = 1 << 18
_INTERRUPTED = 130
_LOCALHOST = "127.0.0.1"
_ABOUT = (
    "Judge shell commands by the user's policy with validate_command, and run them with run_in_sandbox: in a copy of "
    "the workspace at /workspace, without a network. Nothing that a command does outlives the call; what it changed "
    "in /workspace is returned as a diff."
)

_T = TypeVar("_T")


class CommandVerdict(BaseModel):
    """What the policy says about a command."""

    decision: Literal["allow", "ask", "deny"]
    rule: str = Field(description="The line of the policy that decided, `default`, or `opaque`.")
    span: tuple[int, int] = Field(description="Characters [start, end) of the command that caused it.")
    reason: str = Field(description="One sentence.")


class CommandResult(BaseModel):
    """What a command did in its sandbox."""

    exit_code: int = Field(description="Of the command; minus the signal that ended it.")
    stdout: str
    stderr: str
    timed_out: bool = Field(description="It was ended because its time was up.")
    truncated: bool = Field(description="Some of the output was dropped.")
    seconds: float
    tier: str = Field(description="What kind of sandbox it ran in.")
    changes: str = Field(description="What differs in /workspace from what it began with, as a unified diff.")
    changes_truncated: bool = Field(description="The diff was longer than is returned.")
    not_exported: dict[str, str] = Field(description="Changed paths that the diff leaves out, with the reason.")


class Tools:
    """The tools as plain functions; safe to use from several threads."""

    def __init__(self, policy: Policy, pool: Pool, workspace: Path | None) -> None:
        """Judge by `policy`, run in clones of `pool`, which have a copy of `workspace`."""
        self._policy = policy
        self._pool = pool
        self._workspace = None if workspace is None else str(workspace.resolve())

    def validate(self, command: str, cwd: str | None) -> CommandVerdict:
        """What the policy says.

        Args:
            command: shell text.
            cwd: absolute; None is the workspace, or this process's folder where there is none.

        Raises:
            ParameterError: `cwd` is not absolute.
        """
        folder = cwd or self._workspace or str(Path.cwd())
        if not folder.startswith("/"):
            raise ParameterError(f"cwd is '{folder}'; it must be an absolute path")
        decision = judge(self._policy, command, folder)
        found = decision.as_json()
        return CommandVerdict.model_validate(
            {**found, "rule": _text(decision.rule), "reason": _text(decision.reason)}
        )

    def check(self, command: str, timeout: float, files: dict[str, str]) -> None:
        """Refuse what will not be run.

        Raises:
            ParameterError: it can't be run.
            SandboxError: the policy does not allow it.
        """
        size = len(command.encode(errors="surrogatepass"))
        if size > MAX_COMMAND_BYTES:
            raise ParameterError(f"the command has {size} bytes; at most {MAX_COMMAND_BYTES} can be run at once")
        if not 0 < timeout <= MAX_SECONDS:
            raise ParameterError(f"timeout is {timeout:g}; it must be more than 0 s and at most {MAX_SECONDS:g} s")
        _check_files(files)
        decision = self._strictest(command)
        if decision.verdict is not Verdict.ALLOW:
            start, end = decision.span
            raise SandboxError(
                f"not run, the policy says {decision.verdict.word}: {_text(decision.reason)} "
                f"(rule {_text(decision.rule)}, characters {start} to {end})"
            )
        if "\0" in command or command != _text(command):
            raise ParameterError("the command holds NUL characters or bytes that are not UTF-8; it can't be run")

    def run(
        self, command: str, timeout: float, files: dict[str, str], taken: Callable[[Clone], None]
    ) -> CommandResult:
        """Run a checked command in a clone of its own.

        Args:
            command: shell text.
            timeout: seconds.
            files: relative path to text, written before it runs.
            taken: is given the clone, which it may end at any time.

        Raises:
            SandboxError: there is no clone, or it was ended.
        """
        with self._pool.take() as clone:
            taken(clone)
            if files:
                clone.put({path: content.encode() for path, content in files.items()})
            result = clone.exec(command, timeout=timeout)
            diff, refused = _changes(clone)
        return CommandResult(
            exit_code=result.exit_code,
            stdout=result.stdout.decode(errors="replace"),
            stderr=result.stderr.decode(errors="replace"),
            timed_out=result.timed_out,
            truncated=result.truncated,
            seconds=round(result.seconds, 4),
            tier=result.tier,
            changes=diff[:MAX_DIFF],
            changes_truncated=len(diff) > MAX_DIFF,
            not_exported=refused,
        )

    def _strictest(self, command: str) -> Decision:
        """Of what is said where it runs and of what would be said in the real folder, which gets its changes."""
        folders = [WORKSPACE] if self._workspace is None else [WORKSPACE, self._workspace]
        return max((judge(self._policy, command, folder) for folder in folders), key=lambda found: found.verdict)


def build_server(tools: Tools, at_once: int) -> MCPServer[Any]:
    """The tools behind the protocol.

    Args:
        tools: what does the work.
        at_once: commands that run at the same time; more wait.
    """
    server: MCPServer[Any] = MCPServer("subten", version=__version__, instructions=_ABOUT, log_level="ERROR")
    running = anyio.CapacityLimiter(at_once)

    @server.tool()
    async def validate_command(
        command: Annotated[str, Field(description="Shell text. It is not run.")],
        cwd: Annotated[str | None, Field(description="Absolute folder it would start in [the workspace].")] = None,
    ) -> CommandVerdict:
        """Judge a shell command by the user's policy: allow, ask (a person has to agree) or deny, and why."""
        return await anyio.to_thread.run_sync(_told, lambda: tools.validate(command, cwd))

    @server.tool()
    async def run_in_sandbox(
        command: Annotated[str, Field(description="Text for /bin/sh -c, started in /workspace.")],
        timeout: Annotated[float, Field(description="Seconds; then all that runs is ended.")] = 60.0,
        files: Annotated[
            dict[str, str] | None,
            Field(description="Text files to write first: path below /workspace to content. They count as changes."),
        ] = None,
    ) -> CommandResult:
        """Run a shell command in a fresh sandbox with a copy of the workspace, if the user's policy allows it."""
        given = files or {}
        await anyio.to_thread.run_sync(_told, lambda: tools.check(command, timeout, given))
        held = _Held()
        try:
            return await anyio.to_thread.run_sync(
                _told,
                lambda: tools.run(command, timeout, given, held.take),
                abandon_on_cancel=True,
                limiter=running,
            )
        finally:
            held.end()

    return server


class _Held:
    """The clone of a call, ended with the call: also where the call is given up while the clone is being taken."""

    def __init__(self) -> None:
        self._clone: Clone | None = None
        self._over = False
        self._lock = threading.Lock()

    def take(self, clone: Clone) -> None:
        with self._lock:
            self._clone = clone
            if self._over:
                clone.kill()

    def end(self) -> None:
        with self._lock:
            self._over = True
            if self._clone is not None:
                self._clone.kill()


def open_template(tier: str | None, workspace: Path | None) -> Template:
    """Sandboxes of that tier (`microvm`, `process`), or of the first of them that works here.

    Raises:
        ParameterError: there is no such tier, or the workspace is no folder.
        SandboxError: there are none, and why.
    """
    if workspace is not None and not workspace.is_dir():
        raise ParameterError(f"--workspace is '{workspace}'; it must be a folder")
    if tier is not None and tier not in _TEMPLATES:
        raise ParameterError(f"--tier is '{tier}'; it must be {' or '.join(_TEMPLATES)}")
    limits = Limits(output_bytes=_OUTPUT_BYTES)
    if tier is not None:
        return _TEMPLATES[tier](workspace, limits)
    reasons = []
    for start in _TEMPLATES.values():
        try:
            return start(workspace, limits)
        except SandboxError as error:
            reasons.append(str(error))
    raise SandboxError(f"no sandbox works on this machine: {'; '.join(reasons)}")


_TEMPLATES: dict[str, Callable[[Path | None, Limits], Template]] = {
    "microvm": lambda workspace, limits: MicroVMTemplate(workspace, limits=limits),
    "process": lambda workspace, limits: ProcessTemplate(workspace, limits=limits),
}


def serve(
    policy: Policy,
    workspace: Path | None,
    tier: str | None,
    clones: int,
    port: int | None,
    say: Callable[[str], None],
) -> None:
    """Serve until the client is gone; ends the process on SIGINT and SIGTERM. For the main thread.

    Args:
        policy: what may be run.
        workspace: folder whose copy commands find at /workspace.
        tier: of the sandboxes [default: microVMs where they work].
        clones: kept ready, and the most that run at a time.
        port: on localhost, for streamable HTTP; None is standard input and output.
        say: gets a line when everything is ready.

    Raises:
        ParameterError: there is no such tier, not 1 to `MOST_CLONES` clones, the workspace is no folder, or the port
            is taken.
        SandboxError: no sandbox works.
    """
    require_clones("--clones", clones)
    listener = None if port is None else _listen(port)
    with open_template(tier, workspace) as template, _ended_by_signals(template), Pool(template, clones) as pool:
        server = build_server(Tools(policy, pool, workspace), clones)
        where = f"http://{_LOCALHOST}:{listener.getsockname()[1]}/mcp" if listener else "standard input and output"
        say(f"MCP server on {where}; sandboxes: {template.tier}")
        if listener is None:
            anyio.run(server.run_stdio_async)
        else:
            _serve_http(server, listener)


@contextlib.contextmanager
def _ended_by_signals(template: Template) -> Iterator[None]:
    """SIGINT and SIGTERM end this process at once, where a thread that reads the standard input would hold it up.

    The sandboxes die with it; the template's files are removed.
    """

    def leave(number: int, _frame: object) -> NoReturn:
        template.close()
        os._exit(_INTERRUPTED if number == signal.SIGINT else 0)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_LOCALHOST, port))
    except OverflowError as error:
        raise ParameterError(f"--http is {port}; a port is at most 65535") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ParameterError(f"port {port} can't be listened on: {reason}") from error


def _serve_http(server: MCPServer[Any], listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(server.streamable_http_app(host=_LOCALHOST), log_level="error")
    anyio.run(lambda: uvicorn.Server(config).serve(sockets=[listener]))


def _told(work: Callable[[], _T]) -> _T:
    """Do it; what a caller can do something about becomes the answer."""
    try:
        return work()
    except SubtenError as error:
        raise ToolError(str(error)) from error


def _check_files(files: dict[str, str]) -> None:
    size = sum(len(content.encode(errors="surrogatepass")) for content in files.values())
    if len(files) > MAX_FILES or size > MAX_FILES_BYTES:
        raise ParameterError(
            f"files has {len(files)} files of {size} bytes; at most {MAX_FILES} of {MAX_FILES_BYTES} bytes together "
            "can be given"
        )
    for path, content in files.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise ParameterError(f"files has '{_text(path)}'; a path must lead to below /workspace and be relative")
        if _text(path) != path or _text(content) != content:
            raise ParameterError(f"files has '{_text(path)}', which is no valid text")


def _changes(clone: Clone) -> tuple[str, dict[str, str]]:
    """The diff, and what it leaves out."""
    try:
        found = clone.changes()
    except SandboxError as error:
        return "", {WORKSPACE: str(error)}
    return _text(found.diff()), {_text(refusal.path): _text(refusal.reason) for refusal in found.refused}


def _text(text: str) -> str:
    """Text that can be sent: bytes that were no UTF-8 as escapes."""
    return text.encode(errors="backslashreplace").decode()
