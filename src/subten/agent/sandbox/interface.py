"""What every sandbox can do, whatever it is made of. A `Template` is prepared once, its `Clone`s are thrown away."""

from __future__ import annotations

import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from subten.agent.sandbox.changes import Changes, Entry
from subten.agent.sandbox.channel import Channel, Frame, LostError
from subten.agent.sandbox.guest.agent import CHUNK, WORKSPACE
from subten.agent.sandbox.workspace import Workspace, gather
from subten.errors import ParameterError, SandboxError

GRACE_SECONDS = 10.0
"""How long a guest may take to obey; then its clone is ended."""

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": "/home/agent",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
_FILE_BYTES = 64 << 20
_LONGEST_SECONDS = 1_000_000
"""That a command may run: sockets can't wait for any number of seconds."""


@dataclass(frozen=True)
class Limits:
    """What one clone may use.

    Attributes:
        memory_mib: memory; of the machine in a microVM, of each process elsewhere.
        disk_mib: bytes it can write to all files together.
        processes: processes at a time.
        output_bytes: output of one command that is kept; the rest is counted and dropped.
    """

    memory_mib: int = 256
    disk_mib: int = 64
    processes: int = 256
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, least in (("memory_mib", 128), ("disk_mib", 1), ("processes", 8), ("output_bytes", 0)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Output:
    """A piece of output as it comes.

    Attributes:
        stream: "stdout" or "stderr".
        data: its bytes.
    """

    stream: str
    data: bytes


@dataclass(frozen=True)
class Result:
    """What a command did.

    Attributes:
        exit_code: of the command; minus the signal that ended it.
        stdout: the kept part of its standard output.
        stderr: the kept part of its standard error.
        output_bytes: all that it wrote to both while it ran.
        timed_out: it was ended, with every other process of the clone, because its time was up.
        seconds: in the clone, from start to end.
        tier: what kind of sandbox it ran in.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    output_bytes: int
    timed_out: bool
    seconds: float
    tier: str

    @property
    def truncated(self) -> bool:
        """Whether some of the output was dropped."""
        return self.output_bytes > len(self.stdout) + len(self.stderr)

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


class Clone(ABC):
    """A running sandbox. Its methods may be called from any thread, one at a time; `kill` at any time.

    Every method but `kill` raises SandboxError when the clone was ended or its guest no longer answers; then it is
    ended.
    """

    def __init__(self, name: str, tier: str, limits: Limits, workspace: Workspace, channel: Channel) -> None:
        """For back ends; a user gets clones from a template.

        Args:
            name: of this clone alone; its host name.
            tier: what kind of sandbox this is.
            limits: what it may use.
            workspace: what its folder /workspace held at the start.
            channel: to its guest agent.
        """
        self.name = name
        self.tier = tier
        self.limits = limits
        self._workspace = workspace
        self._channel = channel
        self._one_at_a_time = threading.Lock()
        self._ended = False

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> Result:
        """Run a command to its end. Processes that it leaves in the background go on until a timeout or `kill`.

        Args:
            command: text for `/bin/sh -c`, or a program and its arguments.
            timeout: seconds; then every process of the clone is killed, and the clone can still be used.
            stdin: its standard input.
            cwd: the folder it starts in.
            env: variables on top of PATH, HOME, USER, LANG and TERM; nothing of the host's environment gets in.
            on_output: called in this thread with each piece of output that is kept, as it comes.
        """
        if not 0 < timeout <= _LONGEST_SECONDS:
            raise ParameterError(
                f"timeout is {timeout}; it must be more than 0 seconds and at most {_LONGEST_SECONDS}"
            )
        text = command if isinstance(command, str) else f"exec {shlex.join(command)}"
        variables = {**_ENVIRONMENT, **(env or {})}
        if "\0" in "".join((text, cwd, *variables, *variables.values())):
            raise ParameterError("a command, its folder and its variables can't hold NUL characters")
        for name in variables:
            if not name or "=" in name:
                raise ParameterError(f"the name of a variable is {name!r}; it must be text without '='")
        request = {
            "do": "exec",
            "argv": ["/bin/sh", "-c", text],
            "cwd": cwd,
            "env": variables,
            "output_bytes": self.limits.output_bytes,
        }
        kept: dict[bytes, list[bytes]] = {b"1": [], b"2": []}
        room = self.limits.output_bytes

        def receive(kind: bytes, payload: bytes) -> None:
            nonlocal room
            room -= len(payload)
            if kind not in kept or room < 0:
                raise LostError("its guest agent broke the protocol")
            kept[kind].append(payload)
            if on_output is not None:
                on_output(Output("stdout" if kind == b"1" else "stderr", payload))

        answer = self._request(request, [*_data(stdin), (b"e", b"")], receive, soft=timeout)
        return Result(
            exit_code=int(answer["exit_code"]),
            stdout=b"".join(kept[b"1"]),
            stderr=b"".join(kept[b"2"]),
            output_bytes=int(answer["output_bytes"]),
            timed_out=bool(answer["killed"]),
            seconds=float(answer["seconds"]),
            tier=self.tier,
        )

    def put(self, files: Mapping[str, bytes], folder: str = WORKSPACE) -> None:
        """Write files; folders on their way are made.

        Args:
            files: path, relative to `folder`, to content.
            folder: absolute path.
        """
        self._put(((path, Entry("file", 0o644, content)) for path, content in files.items()), folder)

    def get(self, path: str, max_bytes: int = _FILE_BYTES) -> bytes:
        """The content of a regular file.

        Args:
            path: absolute, or relative to /workspace.
            max_bytes: a larger file is an error.
        """
        parts: list[bytes] = []
        room = max_bytes

        def receive(kind: bytes, payload: bytes) -> None:
            nonlocal room
            room -= len(payload)
            if kind != b"d" or room < 0:
                raise LostError("its guest agent broke the protocol")
            parts.append(payload)

        place = path if path.startswith("/") else f"{WORKSPACE}/{path}"
        self._request({"do": "get", "path": place, "max_bytes": max_bytes}, (), receive)
        return b"".join(parts)

    def changes(self) -> Changes:
        """What differs in /workspace from what the template put there. Folders named .git are left out."""
        frames: list[Frame] = []
        room = _FILE_BYTES

        def receive(kind: bytes, payload: bytes) -> None:
            nonlocal room
            room -= len(payload) + 64
            if room < 0:
                raise LostError(f"its changes are larger than {_FILE_BYTES} bytes")
            frames.append((kind, payload))

        self._request({"do": "changes"}, (), receive)
        return gather(frames, self._workspace)

    @property
    @abstractmethod
    def process_id(self) -> int:
        """On the host, of the process that all others of the clone are below."""

    @abstractmethod
    def refresh(self) -> None:
        """Set its clock and renew its randomness; done before a clone is handed out, and by a pool once more."""

    @abstractmethod
    def branch(self) -> Clone:
        """Another clone that goes on from where this one is, while this one goes on too."""

    def kill(self) -> None:
        """End it at once and free what it holds. May be called again, and while another thread waits in `exec`."""
        self._ended = True
        self._end()
        self._channel.close()

    @property
    def alive(self) -> bool:
        """Whether it has not been ended."""
        return not self._ended

    @abstractmethod
    def _end(self) -> None:
        """End its processes. Must not fail when they are gone."""

    def _put(self, entries: Iterable[tuple[str, Entry]], folder: str) -> None:
        self._request({"do": "put", "folder": folder}, _frames(entries), soft=None)

    def _request(
        self,
        request: Mapping[str, Any],
        frames: Iterable[Frame] = (),
        receive: Callable[[bytes, bytes], None] | None = None,
        *,
        soft: float | None = None,
    ) -> dict[str, Any]:
        """Ask the guest. After `soft` seconds it is told to end what runs; without it, it must only keep talking."""
        with self._one_at_a_time:
            if self._ended:
                raise SandboxError(f"the clone {self.name} was ended; take a new one from its template")
            try:
                answer = self._channel.request(request, frames, receive, soft, GRACE_SECONDS)
            except LostError as error:
                ended = self._ended
                self.kill()
                if ended:
                    raise SandboxError(f"the clone {self.name} was ended while it was at work") from error
                raise SandboxError(f"the clone {self.name} was ended: {error}") from error
            except BaseException:
                # The answer is still to come: nothing else can be asked over this channel.
                self.kill()
                raise
        if "error" in answer:
            raise SandboxError(f"{request['do']} failed in the clone {self.name}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Template(ABC):
    """A prepared sandbox that clones are made of.

    Attributes:
        tier: what kind of sandbox its clones are.
        limits: what each clone may use.
        workspace: the copy of the folder that clones find at /workspace.
    """

    def __init__(self, tier: str, limits: Limits, workspace: Workspace) -> None:
        self.tier = tier
        self.limits = limits
        self.workspace = workspace

    @abstractmethod
    def clone(self) -> Clone:
        """A new clone: its clock set, its randomness its own.

        Raises:
            SandboxError: it could not be started.
        """

    def close(self) -> None:
        """Free what it holds. No more clones can be made; end those that there are before."""
        self.workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _data(content: bytes) -> Iterator[Frame]:
    for start in range(0, len(content), CHUNK):
        yield b"d", content[start : start + CHUNK]


def _frames(entries: Iterable[tuple[str, Entry]]) -> Iterator[Frame]:
    for path, entry in entries:
        yield b"f", entry.head(path)
        if entry.kind == "file":
            yield from _data(entry.content)
    yield b"e", b""
