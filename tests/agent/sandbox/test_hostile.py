"""What a clone does to others when it means ill: nothing. After each attack the host and a sibling still answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from subten.agent.sandbox import Clone, MicroVMTemplate, Template, interface
from subten.agent.sandbox.microvm import Image
from subten.errors import SandboxError
from support.processes import descendants, require_end, runs
from support.sandbox import LIMITS

MIB = 1 << 20


@pytest.fixture
def sibling(template: Template) -> Iterator[Clone]:
    """Lives through the attack and is asked afterwards."""
    with template.clone() as sibling:
        sibling.exec("echo untouched > /tmp/mine")
        yield sibling
        assert sibling.exec("cat /tmp/mine", timeout=30).stdout == b"untouched\n"
        assert subprocess.run(["true"], timeout=60).returncode == 0


def test_fork_bomb(clone: Clone, sibling: Clone) -> None:
    result = clone.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 1000"], timeout=2)
    assert result.timed_out
    assert int(clone.exec("ps -e | wc -l").stdout) < 100


def test_fork_bomb_left_behind(clone: Clone, sibling: Clone) -> None:
    clone.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb > /dev/null 2>&1"])
    assert sibling.exec("echo here").stdout == b"here\n"
    # While it rages a command may find no room, not even for its shell; a timeout clears it.
    try:
        with_timeout = clone.exec("sleep 1000", timeout=2)
    except SandboxError as error:
        if "Resource temporarily unavailable" not in str(error):
            raise
        clone.kill()
        return
    assert with_timeout.timed_out or with_timeout.exit_code != 0
    if not with_timeout.timed_out:
        clone.kill()
        return
    assert clone.exec("echo quiet").stdout == b"quiet\n"


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm", "/usr", "/home/agent"])
def test_disk_fill(clone: Clone, sibling: Clone, folder: str) -> None:
    result = clone.exec(
        f"head -c {3 * LIMITS.disk_mib}M /dev/zero > {folder}/fill; stat -c %s {folder}/fill", timeout=60
    )
    written = int(result.stdout or b"0")
    assert written <= LIMITS.disk_mib * MIB
    assert b"No space left" in result.stderr or b"Permission denied" in result.stderr
    assert clone.exec(f"rm -f {folder}/fill; echo fine").stdout == b"fine\n"


def test_too_many_files(clone: Clone, sibling: Clone) -> None:
    made = clone.exec("mkdir d; cd d; i=0; while true > $i; do i=$((i + 1)); done 2> /dev/null; echo $i", timeout=2)
    assert made.timed_out or int(made.stdout) < 1_000_000
    assert clone.exec("echo fine").stdout == b"fine\n"


def test_a_gibibyte_of_output(clone: Clone, sibling: Clone) -> None:
    size = 1024
    assert size > LIMITS.memory_mib
    result = clone.exec(f"dd if=/dev/zero bs=1M count={size} status=none; echo end >&2", timeout=120)
    assert result.ok
    assert result.truncated
    assert result.output_bytes == size * MIB + len("end\n")
    assert len(result.stdout) == LIMITS.output_bytes


def test_orphans_are_reaped(clone: Clone, sibling: Clone) -> None:
    """500, of shells that end before them; as many at a time as there may be processes."""
    orphans = "sh -c 'for i in $(seq 167); do sleep 0.2 > /dev/null 2>&1 & done'"
    for _ in range(3):
        assert clone.exec(orphans, timeout=60).ok
        # Neither running nor ended and still listed.
        gone = clone.exec("while ps -eo comm= | grep -q ^sleep; do :; done", timeout=60)
        assert not gone.timed_out


def test_memory_hog(clone: Clone, sibling: Clone) -> None:
    hog = "x = bytearray()\nwhile True: x += bytes(1 << 24)"
    result = clone.exec(["python3", "-c", hog], timeout=60)
    assert not result.ok
    assert not result.timed_out
    assert clone.exec("echo fine").stdout == b"fine\n"


def test_no_network(clone: Clone, sibling: Clone) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        script = (
            "import os, socket\n"
            "print(sorted(os.listdir('/sys/class/net')) if os.path.isdir('/sys/class/net') else ['lo'])\n"
            f"for place in (('192.0.2.1', 80), ('127.0.0.1', {server.getsockname()[1]})):\n"
            "    try: socket.create_connection(place, timeout=3); print('connected')\n"
            "    except OSError as error: print(type(error).__name__)\n"
            "try: print(socket.getaddrinfo('example.com', 80))\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        out = clone.exec(["python3", "-c", script], timeout=60).stdout.decode().splitlines()
        assert out == ["['lo']", "OSError", "ConnectionRefusedError", "gaierror"]
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_agent_is_out_of_reach(clone: Clone, sibling: Clone) -> None:
    for attempt in ("kill -9 1", "kill -STOP 1", "cat /proc/1/mem", "ls /proc/1/fd", "kill -TERM 1", "kill -CHLD 1"):
        clone.exec(attempt)
    assert clone.exec("ls /proc/1/fd").exit_code != 0
    assert clone.exec("echo fine").stdout == b"fine\n"


def test_no_way_to_more_rights(clone: Clone) -> None:
    status = clone.exec("grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status").stdout.split()
    assert status[1::2] == [b"0" * 16, b"0" * 16, b"1"]


def test_no_way_out_of_the_process_tier(process_template: Template) -> None:
    with process_template.clone() as clone:
        for attempt in (
            "unshare -U true",
            "mount -t tmpfs x /tmp",
            "chroot / true",
            "ls /proc/1/root/",
            "ls /root/.ssh",
        ):
            assert clone.exec(attempt).exit_code != 0
        assert set(clone.exec("ls -A /home /root").stdout.split()) <= {b"/home:", b"agent", b"/root:", b".pyenv"}


def test_clones_of_a_machine_differ(microvm_template: MicroVMTemplate) -> None:
    def ask(_: int) -> bytes:
        with microvm_template.clone() as clone:
            return clone.exec("od -An -tx8 -N16 /dev/urandom; cat /proc/sys/kernel/hostname /etc/machine-id").stdout

    with ThreadPoolExecutor(4) as threads:
        answers = [answer.split() for answer in threads.map(ask, range(4))]
    for values in zip(*answers, strict=True):
        assert len(set(values)) == 4


def test_clock(microvm_template: MicroVMTemplate) -> None:
    time.sleep(1)  # the template's clock is at least that far behind
    skews = []
    for _ in range(3):
        with microvm_template.clone() as clone:
            before = time.time()
            guest = float(clone.exec("date +%s.%N").stdout)
            after = time.time()
            skews.append(max(before - guest, guest - after, 0))
    # A machine that is busy puts one of them aside while it is told the time.
    assert min(skews) < 0.1


def test_a_hundred_commands_after_a_restore(microvm_template: MicroVMTemplate) -> None:
    with microvm_template.clone() as clone:
        for number in range(100):
            assert clone.exec(f"echo {number}").stdout == b"%d\n" % number


def test_a_guest_that_never_answers(microvm_template: MicroVMTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    with microvm_template.clone() as clone:
        clone._machine.monitor.command("stop")
        monkeypatch.setattr(interface, "GRACE_SECONDS", 0.5)
        with pytest.raises(SandboxError, match=r"did not answer within 0\.5 s"):
            clone.exec("true", timeout=0.5)
        assert not clone.alive
        assert not runs(clone.process_id)


def test_an_agent_that_hangs(process_template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    with process_template.clone() as clone:
        clone.exec("sleep 1000 > /dev/null 2>&1 &")
        family = [clone.process_id, *descendants(clone.process_id)]
        assert len(family) >= 3
        for process in family[1:]:
            os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr(interface, "GRACE_SECONDS", 0.5)
        with pytest.raises(SandboxError, match=r"did not answer within 0\.5 s"):
            clone.exec("true", timeout=0.5)
        require_end(family)


def test_qemu_is_confined(microvm_template: MicroVMTemplate) -> None:
    with microvm_template.clone() as clone:
        status = Path(f"/proc/{clone.process_id}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in status)
        assert fields["Seccomp"] == "2"
        assert fields["NoNewPrivs"] == "1"
        assert os.geteuid() != 0 or "0" not in fields["Uid"].split()
        command = Path(f"/proc/{clone.process_id}/cmdline").read_text()
        assert "-netdev" not in command
        assert "-nic" not in command
        assert "-nodefaults" in command


_PARENT = """
import json, sys, time
from pathlib import Path
from subten.agent.sandbox import MicroVMTemplate, ProcessTemplate
from subten.agent.sandbox.microvm import Image
from subten.agent.sandbox.microvm.machine import TCG
tier, folder = sys.argv[1:]
if tier == "process":
    template = ProcessTemplate()
else:
    template = MicroVMTemplate(image=Image(Path(folder), {}), accelerated_by=TCG)
clones = [template.clone() for _ in range(2)]
clones[0].exec("setsid sleep 1000 > /dev/null 2>&1 &")
print(json.dumps(1), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("tier", ["process", "microvm"])
def test_nothing_outlives_a_killed_parent(tier: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"{tier}_template")
    image: Image | None = request.getfixturevalue("image") if tier == "microvm" else None
    folder = "" if image is None else str(image.folder)
    # It can't remove its copy of the workspace any more. The user of the sandbox must be able to reach that folder.
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        _kill_a_parent([sys.executable, "-c", _PARENT, tier, folder], {**os.environ, "TMPDIR": scratch})


def _kill_a_parent(command: list[str], environment: dict[str, str]) -> None:
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert json.loads(parent.stdout.readline()) == 1
        family = descendants(parent.pid)
        assert len(family) >= 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    require_end(family)
