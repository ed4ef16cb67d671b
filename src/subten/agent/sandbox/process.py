"""Sandboxes made of namespaces: quick and available without QEMU, but on the host's kernel. Not a VM.

A clone is bubblewrap on a root folder of its own: a tmpfs of limited size, over which the host's /usr and the
workspace lie as the lower layers of overlays, so that everything can be written and nothing of it stays. The overlays
are mounted in a user namespace around bubblewrap; inside, there is one user without capabilities, no network but its
own loopback, no other processes, and no way to new namespaces.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from subten.agent.sandbox.channel import Channel, LostError
from subten.agent.sandbox.guest import agent as guest_agent
from subten.agent.sandbox.identity import as_user, new_name, new_user
from subten.agent.sandbox.interface import Clone, Limits, Template
from subten.agent.sandbox.spawn import spawn
from subten.agent.sandbox.workspace import Workspace
from subten.errors import SandboxError

TIER = "process: not a VM"
USER = 1000

_START_SECONDS = 20.0
_PROGRAMS = {"bwrap": "bubblewrap", "unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
_SHARED = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ssl/certs",
    "/etc/localtime",
)
"""What programs in /usr need of the host's /etc and nobody has to keep secret."""

_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class ProcessTemplate(Template):
    """Clones made of bubblewrap."""

    def __init__(
        self, workspace: Path | None = None, *, limits: Limits | None = None, readable: Sequence[Path] = ()
    ) -> None:
        """Copy the workspace and check that sandboxes can be started.

        Args:
            workspace: a folder whose copy clones find at /workspace; empty without.
            limits: what a clone may use. The memory limit is one of each process.
            readable: more folders of the host that clones can read, at the same place. /usr and the running Python
                are.

        Raises:
            SandboxError: they can't; the message says what to install or allow.
        """
        reason = unavailable()
        if reason is not None:
            raise SandboxError(reason)
        super().__init__(TIER, limits or Limits(), Workspace(workspace))
        self._user = new_user()
        system = [path for name in _TOP_LEVEL if (path := Path("/", name)).is_dir() and not path.is_symlink()]
        wanted = [*system, *map(Path, _SHARED), Path(sys.base_prefix), *(path.absolute() for path in readable)]
        self._readable = [path for path in dict.fromkeys(wanted) if path.exists() and not path.is_relative_to("/usr")]
        root = self.workspace.root
        (root / "mount").mkdir()
        for number, path in enumerate(self._readable):
            place = root / f"readable-{number}"
            place.mkdir() if path.is_dir() else place.touch()
        shutil.copyfile(guest_agent.__file__, root / "agent.py")
        if self._user is not None:
            _give(root, self._user)

    def clone(self) -> ProcessClone:
        """See Template."""
        ours, theirs = socket.socketpair()
        name = new_name()
        try:
            process = spawn(self._command(name, theirs.fileno()), [theirs.fileno()])
        except SandboxError:
            ours.close()
            raise
        finally:
            theirs.close()
        clone = ProcessClone(name, self, Channel(ours), process)
        try:
            clone.wait_ready()
        except LostError:
            complaint = clone.complaint()
            clone.kill()
            raise SandboxError(f"a sandbox could not be started: {complaint}") from None
        return clone

    def _command(self, name: str, channel: int) -> list[str]:
        root = self.workspace.root
        limits = {"processes": self.limits.processes, "data_bytes": self.limits.memory_mib << 20}
        shown = [
            item for number, path in enumerate(self._readable) for item in ("--ro-bind", self._source(number), path)
        ]
        bwrap = [
            *("bwrap", "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid", "--unshare-net"),
            *("--unshare-uts", "--unshare-cgroup-try", "--hostname", name),
            *("--die-with-parent", "--new-session", "--as-pid-1"),
            *("--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL", "--clearenv"),
            *("--bind", f"{root}/mount/root", "/", "--proc", "/proc", "--dev", "/dev"),
            *("--bind", f"{root}/mount/shm", "/dev/shm", "--remount-ro", "/dev", *map(str, shown)),
            *("--chdir", guest_agent.WORKSPACE, "--", _python(), "-I", "-S", "-B", "/run/agent.py"),
            *(str(channel), str(USER), json.dumps(limits)),
        ]
        script = _script(root / "mount", self.workspace.folder, root / "agent.py", self.limits)
        inner = [*as_user(self._user), "unshare", "--user", "--map-root-user", "--mount", "sh", "-euc"]
        inner.append(f"{script}\nexec {shlex.join(bwrap)}")
        if self._user is None:
            return inner
        # The other user may not be able to reach these folders by their names; root mounts them where it can.
        binds = [
            f"mount --bind {shlex.quote(str(path))} {shlex.quote(self._source(number))}"
            for number, path in enumerate(self._readable)
        ]
        return ["unshare", "--mount", "sh", "-euc", "\n".join([*binds, f"exec {shlex.join(inner)}"])]

    def _source(self, number: int) -> str:
        if self._user is None:
            return str(self._readable[number].resolve())
        return f"{self.workspace.root}/readable-{number}"


class ProcessClone(Clone):
    """A clone made of bubblewrap."""

    def __init__(
        self, name: str, template: ProcessTemplate, channel: Channel, process: subprocess.Popen[bytes]
    ) -> None:
        """For ProcessTemplate."""
        super().__init__(name, TIER, template.limits, template.workspace, channel)
        self._template = template
        self._process = process

    def wait_ready(self) -> None:
        """Wait for the guest agent and let it note what the workspace holds.

        Raises:
            LostError: it did not come.
        """
        self._channel.wait_ready(_START_SECONDS)
        self._request({"do": "mark"})

    @property
    def process_id(self) -> int:
        """See Clone."""
        return self._process.pid

    def refresh(self) -> None:
        """Ask whether it is alive: clock and randomness are the host's."""
        self._request({"do": "ping"})

    def branch(self) -> ProcessClone:
        """Another clone with the same workspace but for changes in folders named .git.

        Files elsewhere and running processes are not in it: this is no VM.

        Raises:
            SandboxError: the workspace holds changes that can't be exported.
        """
        changes = self.changes()
        if changes.refused:
            first = changes.refused[0]
            raise SandboxError(f"{first.path} can't be taken over into a branch: {first.reason}")
        branch = self._template.clone()
        gone = [
            os.fsencode(change.path)
            for change in changes.changed
            if change.after is None or (change.before and change.before.kind != change.after.kind)
        ]
        branch.exec("xargs -0 rm -rf --", stdin=b"\0".join(gone))
        branch._put(((c.path, c.after) for c in changes.changed if c.after is not None), guest_agent.WORKSPACE)
        return branch

    def complaint(self) -> str:
        """What the programs that start a sandbox printed last; for a clone that has failed."""
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read(4096).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it gave no reason"

    def _end(self) -> None:
        # This is bubblewrap; process 1 of the sandbox dies with it, and everything in the sandbox with process 1.
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


@functools.cache
def unavailable() -> str | None:
    """Why process sandboxes can't run here; None where they do. Tried once per process."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"process sandboxes need the program {program}; install the package {package}"
    test = (
        "mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/m && "
        "mount -t overlay -o userxattr,lowerdir=/usr,upperdir=/mnt/u,workdir=/mnt/w overlay /mnt/m && "
        "exec bwrap --unshare-all --unshare-user --disable-userns --as-pid-1 --ro-bind / / --proc /proc --dev /dev "
        "true"
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*as_user(new_user()), "unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", test],
            capture_output=True,
            cwd="/",
            timeout=_START_SECONDS,
        )
        if done.returncode == 0:
            return None
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return (
            f"process sandboxes need user namespaces with overlay mounts, which this machine refuses: {said[-1]}; "
            "sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0 allows them"
        )
    return "process sandboxes did not start within 20 s on this machine"


def _script(mount: Path, workspace: Path, agent: Path, limits: Limits) -> str:
    """Shell text that builds the root folder of a clone."""
    base, root = shlex.quote(str(mount)), shlex.quote(f"{mount}/root")
    lines = [
        f"mount -t tmpfs -o size={limits.disk_mib}m,nr_inodes={limits.disk_mib * 1024},mode=755 tmpfs {base}",
        f"mkdir -m 755 {root} {base}/usr {base}/usr.work {base}/work {base}/work.work",
        f"mkdir -m 1777 {base}/shm {root}/tmp {root}/var {root}/var/tmp",
        f"mkdir -m 755 -p {root}/usr {root}/workspace {root}/home/agent {root}/dev {root}/proc {root}/etc {root}/run",
        _overlay("/usr", f"{mount}/usr", f"{mount}/root/usr"),
        _overlay(str(workspace), f"{mount}/work", f"{mount}/root/workspace"),
        f"cp {shlex.quote(str(agent))} {root}/run/agent.py",
        f"echo agent:x:{USER}:{USER}:agent:/home/agent:/bin/sh > {root}/etc/passwd",
        f"echo agent:x:{USER}: > {root}/etc/group",
        f"echo 127.0.0.1 localhost > {root}/etc/hosts",
        f"echo hosts: files > {root}/etc/nsswitch.conf",
    ]
    for name in _TOP_LEVEL:
        top = Path("/", name)
        if top.is_symlink():
            lines.append(f"ln -s {shlex.quote(str(top.readlink()))} {root}/{name}")
    return "\n".join(lines)


def _overlay(lower: str, upper: str, target: str) -> str:
    options = f"userxattr,lowerdir={lower},upperdir={upper},workdir={upper}.work"
    return f"mount -t overlay -o {shlex.quote(options)} overlay {shlex.quote(target)}"


def _python() -> str:
    version = sys.version_info
    return str(Path(sys.base_prefix) / "bin" / f"python{version.major}.{version.minor}")


def _give(root: Path, user: int) -> None:
    os.chown(root, user, user)
    for here, folders, files in os.walk(root):
        for name in (*folders, *files):
            os.chown(Path(here, name), user, user, follow_symlinks=False)
