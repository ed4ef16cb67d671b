"""The guest agent: first process of a sandbox, runs commands and moves files for the host over one byte stream.

It is one file for every tier: process 1 of a microVM behind a virtio-serial port, and process 1 of a process sandbox
behind a socket. A message is a frame: one byte of kind, four bytes of length (big endian), the payload.

    host to guest    q  a request, JSON            guest to host    r  the result of a request, JSON; ends it
                     f  a file begins, JSON                         f  a file begins, JSON
                     d  bytes of it                                 d  bytes of it
                     e  the input ends                              1  bytes of standard output
                     k  end what runs                               2  bytes of standard error

As process 1 it inherits every orphan and reaps it, it can't be killed from inside, and `kill(-1)` reaches everything
else at one stroke: a command that forks faster than one can count does not outlive its time. Commands and file
operations run as the user of the sandbox in a child, never in the agent. Commands run in copies of a shell that waits
for them where one does (`WaitingShell`), else in one that is started for them; it makes no difference but in time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import mmap
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

HEADER = struct.Struct(">cI")
CHUNK = 1 << 16
WORKSPACE = "/workspace"
NEVER_EXPORTED = frozenset({".git"})
"""Folders whose content would run code on the host (hooks), by name at any depth."""

_BURIAL_SECONDS = 5
_PRIORITY = os.sched_param(0)
_WIDE_PIPE = 1 << 20
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207  # linux/random.h: RNDADDENTROPY, RNDRESEEDCRNG

_SHELL = ["/bin/sh", "-c"]
_READ_AT_START = ("LD_", "GLIBC_", "MALLOC_")
"""Variables that the loader and the C library have read before a shell waits."""
_ID = struct.Struct("i")
_FILES = struct.Struct("3i")

Fingerprint = tuple[int, ...]
Files = tuple[int, int, int]
"""Standard input, output and error of a command."""


class HostGoneError(Exception):
    """The host closed the stream: nobody is left to work for."""


class Stream:
    """Frames over a file descriptor."""

    def __init__(self, descriptor: int, patient: bool) -> None:
        """`patient`: a read of nothing means that the host is not connected yet (virtio-serial), not that it left."""
        self.descriptor = descriptor
        self._patient = patient
        self._buffer = b""
        self._held = b""

    @property
    def pending(self) -> bool:
        """Whether bytes of the next frame have been read already: a poll of the descriptor does not show those."""
        return bool(self._buffer)

    @property
    def holding(self) -> bool:
        """Whether frames are on hold."""
        return bool(self._held)

    def forget(self) -> None:
        """Drop what has been read ahead, after a child has read on from here."""
        self._buffer = b""

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame: kind and payload."""
        kind, length = HEADER.unpack(self._exactly(HEADER.size))
        return kind, self._exactly(length)

    def hold(self, kind: bytes, payload: bytes) -> None:
        """A frame that may go out with the next one: each write is an exit to the host."""
        self._held += HEADER.pack(kind, len(payload)) + payload
        if len(self._held) > CHUNK:
            self.flush()

    def send(self, kind: bytes, payload: bytes) -> None:
        """Write one frame, after those on hold; waits while the host does not read."""
        self._held += HEADER.pack(kind, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Write what is on hold."""
        rest, self._held = self._held, b""
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:
                time.sleep(0.001)

    def _exactly(self, length: int) -> bytes:
        while len(self._buffer) < length:
            try:
                part = os.read(self.descriptor, CHUNK)
            except InterruptedError:
                continue
            except (BlockingIOError, ConnectionResetError):
                part = b""
            if not part:
                if not self._patient:
                    raise HostGoneError
                time.sleep(0.001)
                continue
            self._buffer += part
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


class Agent:
    """Answers one request after the other until the host is gone."""

    def __init__(self, stream: Stream, user: int, shell: WaitingShell) -> None:
        """Work for the host behind `stream`; what is run has that user and group id."""
        self._stream = stream
        self._user = user
        self._shell = shell
        self._baseline: dict[str, Fingerprint] = {}
        # Readable whenever a child has ended.
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(stream.descriptor, select.POLLIN)
        self._poller.register(self._woken, select.POLLIN)
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._requests: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "ping": lambda _: {},
            "exec": self._exec,
            "put": self._put,
            "get": self._get,
            "mark": self._mark,
            "changes": self._changes,
            "refresh": self._refresh,
        }

    def serve(self) -> NoReturn:
        """Never returns; raises HostGoneError."""
        self._shell.start()
        self._stream.send(b"r", b"{}")
        while True:
            ready = self._wait()
            if self._woken in ready:
                self._reap()
            if self._stream.descriptor not in ready:
                continue
            kind, payload = self._stream.receive()
            if kind == b"q":
                self._answer(json.loads(payload.decode()))
                self._shell.start()
            # Anything else is left over from a request that has ended, such as `k` for a command that was quicker.

    def _wait(self) -> list[int]:
        """Descriptors with something to read; waits until there is one. Frames on hold go out before it waits."""
        while True:
            at_once = self._stream.pending or self._stream.holding
            ready = [descriptor for descriptor, _ in self._poller.poll(0 if at_once else None)]
            if self._stream.pending and self._stream.descriptor not in ready:
                ready.append(self._stream.descriptor)
            if ready:
                return ready
            self._stream.flush()

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            result = self._requests[request["do"]](request)
        except OSError as error:
            result = {"error": f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")}
        self._stream.send(b"r", json.dumps(result).encode())

    # Commands

    def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin = self._input()
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = os.pipe2(os.O_CLOEXEC)
        outputs = {out: _Output(b"1"), err: _Output(b"2")}
        began = time.monotonic()
        try:
            os.chdir(request["cwd"])
            status, killed = self._follow(request, (stdin, out_end, err_end), outputs)
        finally:
            for descriptor in (out, out_end, err, err_end):
                os.close(descriptor)
            if stdin != self._nothing:
                os.close(stdin)
        return {
            "exit_code": os.waitstatus_to_exitcode(status),
            "killed": killed,
            "output_bytes": sum(output.total for output in outputs.values()),
            "seconds": time.monotonic() - began,
        }

    def _follow(self, request: dict[str, Any], files: Files, outputs: dict[int, _Output]) -> tuple[int, bool]:
        """Start a command and pass output on until it ends, what background processes still hold open not awaited."""
        budget = request["output_bytes"]
        status: int | None = None
        killed = False
        child = 0 if self._shell.give(request, files) else _spawn(request, files)
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
            self._poller.register(descriptor, select.POLLIN)
        try:
            while status is None:
                for descriptor in self._wait():
                    if descriptor == self._woken:
                        ended = self._reap()
                        child = child or self._shell.child
                        if child:
                            status = ended.get(child)
                        elif killed:
                            status = signal.SIGKILL
                        elif not self._shell.process:
                            child = _spawn(request, files)
                    elif descriptor in outputs:
                        budget -= outputs[descriptor].forward(descriptor, self._stream, budget)
                    else:
                        killed = self._stream.receive()[0] == b"k" or killed
                        if killed:
                            os.kill(-1, signal.SIGKILL)
                            self._shell.process = 0
            # What is in the pipes when the command has ended belongs to it; more than they hold does not.
            moved = 0
            while ready := [descriptor for descriptor, _ in self._poller.poll(0) if descriptor in outputs]:
                for descriptor in ready:
                    budget -= outputs[descriptor].forward(descriptor, self._stream, budget)
                moved += CHUNK
                if moved > max(map(_pipe_size, outputs)):
                    break
        finally:
            for descriptor in outputs:
                self._poller.unregister(descriptor)
        if killed:
            self._bury()
        return status, killed

    def _bury(self) -> None:
        """After everything was killed: wait until it is gone, so that the next command finds its limits unused."""
        deadline = time.monotonic() + _BURIAL_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)

    def _reap(self) -> dict[int, int]:
        """Collect all that has ended: process id to wait status."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._woken, 4096)) == 4096:
                pass
        ended = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = found[1]
        if self._shell.process in ended:
            self._shell.process = 0
        return ended

    # Files

    def _as_user(self, work: Callable[[], None]) -> dict[str, Any]:
        """Do it in a child that has the rights of commands and no more. What it raises is the answer's error."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:
                    os.setresgid(self._user, self._user, self._user)
                    os.setresuid(self._user, self._user, self._user)
                work()
            except OSError as error:
                os.write(writer, f"{error.strerror or error}: {error.filename or ''}".encode(errors="replace")[:4096])
            finally:
                os._exit(0)
        os.close(writer)
        problem = b""
        while part := os.read(reader, CHUNK):
            problem += part
        os.close(reader)
        self._stream.forget()
        return {"error": problem.decode(errors="replace")} if problem else {}

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._as_user(lambda: self._write_files(request["folder"]))

    def _write_files(self, folder: str) -> None:
        problem: OSError | None = None
        file = -1
        while True:
            kind, payload = self._stream.receive()
            if kind in (b"f", b"e") and file >= 0:
                os.close(file)
                file = -1
            if kind == b"e":
                break
            # After a failure the rest is read all the same: the host is still sending.
            if problem is None:
                try:
                    if kind == b"f":
                        file = _create(folder, json.loads(payload))
                    elif kind == b"d" and file >= 0:
                        _write(file, payload)
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem

    def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._as_user(lambda: self._send_file(request["path"], request["max_bytes"]))

    def _send_file(self, path: str, max_bytes: int) -> None:
        # O_NONBLOCK: opening a pipe that nobody writes to must not wait.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if os.fstat(file).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)
        while part := os.read(file, CHUNK):
            self._stream.send(b"d", part)

    def _mark(self, _request: dict[str, Any]) -> dict[str, Any]:
        self._baseline = dict(_walk(WORKSPACE))
        return {"files": len(self._baseline)}

    def _changes(self, _request: dict[str, Any]) -> dict[str, Any]:
        return self._as_user(self._send_changes)

    def _send_changes(self) -> None:
        gone = dict(self._baseline)
        for path, fingerprint in _walk(WORKSPACE):
            before = gone.pop(path, None)
            mode = fingerprint[0]
            # A folder's times change with its entries; those are reported themselves.
            same = before == fingerprint or (before is not None and stat.S_ISDIR(mode) and before[0] == mode)
            if not same:
                self._send_entry(path, mode)
        for path, fingerprint in gone.items():
            self._stream.send(b"f", json.dumps({"path": path, "kind": "deleted", "mode": fingerprint[0]}).encode())

    def _send_entry(self, path: str, mode: int) -> None:
        place = os.path.join(WORKSPACE, path)
        head: dict[str, Any] = {"path": path, "mode": stat.S_IMODE(mode), "kind": "other"}
        try:
            if stat.S_ISLNK(mode):
                head |= {"kind": "link", "target": os.readlink(place)}
            elif stat.S_ISDIR(mode):
                head["kind"] = "folder"
            elif stat.S_ISREG(mode):
                file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                self._stream.send(b"f", json.dumps(head | {"kind": "file"}).encode())
                while part := os.read(file, CHUNK):
                    self._stream.send(b"d", part)
                os.close(file)
                return
        except FileNotFoundError:
            return  # a background process removed it just now
        except OSError as error:
            head |= {"kind": "unreadable", "target": error.strerror or str(error)}
        self._stream.send(b"f", json.dumps(head).encode())

    # Identity

    def _refresh(self, request: dict[str, Any]) -> dict[str, Any]:
        """A clone is a copy of a machine that was running: give it the time, randomness and a name of its own."""
        if "seconds" in request:
            time.clock_settime(time.CLOCK_REALTIME, request["seconds"])
        if "entropy" in request:
            fresh = bytes.fromhex(request["entropy"])
            with open("/dev/urandom", "wb", buffering=0) as device:
                fcntl.ioctl(device, _ADD_ENTROPY, struct.pack("ii", 8 * len(fresh), len(fresh)) + fresh)
                fcntl.ioctl(device, _RESEED)
        if "name" in request and os.geteuid() == 0:
            for path, text in (("/proc/sys/kernel/hostname", request["name"]), ("/etc/machine-id", request["id"])):
                with open(path, "w") as file:
                    file.write(f"{text}\n")
        return {}

    def _input(self) -> int:
        """A file with the input that the host sends."""
        kind, payload = self._stream.receive()
        if kind == b"e":
            return self._nothing
        file = os.memfd_create("stdin")
        while kind != b"e":
            _write(file, payload)
            kind, payload = self._stream.receive()
        os.lseek(file, 0, os.SEEK_SET)
        return file


class WaitingShell:
    """A shell that was started ahead of its commands, each of which runs in a copy of it; see shell.c.

    It is one of the processes that commands can kill. Whatever has become of it, a command that it did not start is
    started by the agent, and the next one is started after the answer.

    Attributes:
        process: its id; 0 where none waits.
    """

    def __init__(self, library: str | None) -> None:
        """`library`: shell.c, compiled. Without it no shell waits."""
        self.process = 0
        self._library = library
        self._shared = os.memfd_create("child")
        os.ftruncate(self._shared, mmap.PAGESIZE)
        self._page = mmap.mmap(self._shared, mmap.PAGESIZE)
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self) -> None:
        """Start one where none waits."""
        if self.process or self._library is None:
            return
        self._channel.close()
        self._channel, its_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_channel, contextlib.suppress(OSError):
            request = {"argv": [*_SHELL, ""], "env": {"LD_PRELOAD": self._library, "LD_BIND_NOW": "1"}}
            self.process = _spawn(request, (its_channel.fileno(), self._shared, 2))

    def give(self, request: dict[str, Any], files: Files) -> bool:
        """Hand a command over. It was, or will be, started if `child` says so before `process` is 0."""
        *shell, command = request["argv"]
        variables = [f"{name}={value}" for name, value in request["env"].items()]
        if not self.process or shell != _SHELL or any(text.startswith(_READ_AT_START) for text in variables):
            return False
        message = os.fsencode("\0".join((request["cwd"], *shell, command, *variables, "")))
        self._page[: _ID.size] = bytes(_ID.size)
        try:
            os.kill(self.process, signal.SIGCONT)  # where a command has stopped it
            self._channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILES.pack(*files))])
        except OSError:
            return False  # it has just ended, or the message is too long
        return True

    @property
    def child(self) -> int:
        """The process that runs the command given last; 0 where it has not been started."""
        process: int = _ID.unpack_from(self._page)[0]
        return process


def _spawn(request: dict[str, Any], files: Files) -> int:
    """Start a program with these files as its 0, 1 and 2. Returns its id."""
    return os.posix_spawn(
        request["argv"][0],
        request["argv"],
        request["env"],
        file_actions=[(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(files)],
        resetids=True,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGCHLD),
        scheduler=(os.SCHED_OTHER, _PRIORITY),
    )


class _Output:
    """One of the two output streams of a command."""

    def __init__(self, kind: bytes) -> None:
        self._kind = kind
        self.total = 0
        self._wide = False

    def forward(self, descriptor: int, stream: Stream, budget: int) -> int:
        """Pass on what is there. Returns the bytes sent, at most `budget`.

        Beyond the budget bytes are counted and moved away without being looked at.
        """
        sent = 0
        # What was there may be gone: a command can read its own output.
        with contextlib.suppress(BlockingIOError):
            if budget > 0:
                part = os.read(descriptor, CHUNK)
                self.total += len(part)
                sent = min(len(part), budget)
                stream.hold(self._kind, part[:sent])
            else:
                if not self._wide:
                    # Who writes this much is not to be woken for every 64 KiB of it.
                    self._wide = True
                    with contextlib.suppress(OSError):
                        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _WIDE_PIPE)
                self.total += os.splice(descriptor, _nowhere(), 1 << 20, flags=os.SPLICE_F_NONBLOCK)
        return sent


@functools.cache
def _nowhere() -> int:
    return os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)


def _pipe_size(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def _create(folder: str, head: dict[str, Any]) -> int:
    """Make one entry and return a descriptor to write it with, -1 where nothing is to be written."""
    path = os.path.join(folder, head["path"])
    os.makedirs(path if head["kind"] == "folder" else os.path.dirname(path), exist_ok=True)
    if head["kind"] == "folder":
        os.chmod(path, head["mode"])
        return -1
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    if head["kind"] == "link":
        os.symlink(head["target"], path)
        return -1
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(file, head["mode"])
    return file


def _walk(folder: str) -> Iterator[tuple[str, Fingerprint]]:
    """Everything below a folder in a fixed order, no link followed: relative path and what a change changes."""
    pending = [""]
    while pending:
        below = pending.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue  # unreadable, or gone in between
        for entry in entries:
            if entry.name in NEVER_EXPORTED:
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = f"{below}/{entry.name}".lstrip("/")
            yield path, (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
            if stat.S_ISDIR(info.st_mode):
                pending.append(path)


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _settle(user: int, limits: dict[str, int]) -> None:
    """Give this process what commands inherit, so that starting one takes no more than a spawn.

    The real ids become those of the user: what `posix_spawn` resets the effective ones to. As process 1 the agent
    can't be killed by the signals which that user may then send it, and as nobody may dump it, nobody may trace it.
    """
    _prctl(_SET_DUMPABLE, 0)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _limit(resource.RLIMIT_CORE, 0)
    if "data_bytes" in limits:
        _limit(resource.RLIMIT_DATA, limits["data_bytes"])
    if "processes" in limits:
        _limit(resource.RLIMIT_NPROC, limits["processes"])
    os.umask(0o022)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, 0, 0)
        os.setresuid(user, 0, 0)
        _prctl(_SET_DUMPABLE, 0)  # a change of ids sets it to the system's default


def main(arguments: list[str]) -> None:
    """`agent.py DESCRIPTOR|DEVICE USER LIMITS [LIBRARY]`: serve until the host is gone.

    LIMITS is JSON: `processes` and `data_bytes` of a command; what is missing is not limited. LIBRARY is shell.c,
    compiled; without it no shell waits.
    """
    where, user, limits, *library = arguments
    if where.isdigit():
        stream = Stream(int(where), patient=False)
        os.set_inheritable(stream.descriptor, False)
    else:
        stream = Stream(os.open(where, os.O_RDWR | os.O_CLOEXEC), patient=True)
        # On a processor of its own with commands: the first byte of a command must not take it away from the command,
        # which has ended by the time that it is scheduled out, and all that is left to do is done at once.
        os.sched_setscheduler(0, os.SCHED_BATCH, _PRIORITY)
    _settle(int(user), json.loads(limits))
    with contextlib.suppress(HostGoneError, BrokenPipeError):
        Agent(stream, int(user), WaitingShell(library[0] if library else None)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
