"""A command behaves as one that `sh -c` has just been started for, although a shell may have waited for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from subten.agent.sandbox import Clone, MicroVMTemplate, ProcessTemplate, Result
from subten.errors import ParameterError, SandboxError

DIRECTLY = {"LD_NOTHING": "1"}
"""Variables that the loader may read keep a command from a shell that has been loaded already."""

WAITED = "grep -c /shell.so /proc/$$/maps; true"
"""Prints 1 mapping or more in a shell that has waited, else 0."""


@pytest.fixture(scope="module")
def machine(microvm_template: MicroVMTemplate) -> Iterator[Clone]:
    with microvm_template.clone() as clone:
        yield clone


def waited(clone: Clone) -> bool:
    return clone.exec(WAITED).stdout != b"0\n"


def seen(result: Result) -> tuple[int, bytes, bytes]:
    return result.exit_code, result.stdout, result.stderr


COMMANDS = [
    'echo "$0|$#|$*|$-|$PPID|$?|$!"',
    "tr '\\0' '|' < /proc/$$/cmdline",
    "cut -d ' ' -f 2,4-8 /proc/$$/stat | sed s/$$/self/g",
    "grep -v -e ^Vm -e ^Rss -e ctxt -e id: -e NS -e CoreDumping -e ^State /proc/$$/status",
    "stat -c '%u %g' /proc/$$ /proc/$$/fd; ls -l /proc/$$/fd | sed -e 's/.*[0-9]:[0-9]* //' -e 's/[0-9]*]//'",
    "grep stack /proc/$$/maps",
    "cat /proc/$$/limits /proc/$$/oom_score_adj /proc/$$/cgroup",
    "grep -e policy -e prio /proc/$$/sched; readlink /proc/$$/cwd /proc/$$/root /proc/$$/exe",
    "cat /proc/self/stat | cut -d ' ' -f 4 | sed s/$$/shell/",
    "cut -d ' ' -f 4 /proc/self/stat | sed s/$$/shell/",
    "umask; ulimit -a; pwd; echo $PWD $OLDPWD; set | grep -v -e LD_ -e '^_='",
    "trap; trap 'echo bye' EXIT; trap 'echo term' TERM; kill $$; echo after",
    "if",
    "echo one\necho two\n)",
    "echo 'open",
    "for",
    "no-such-program; echo $?",
    "exit 7",
    "exit 300",
    "exec no-such-program",
    "exec sh -c 'exit 9'",
    "exec echo gone; echo not here",
    "exec 3> /tmp/third; echo x >&3; exec 3>&-; cat /tmp/third",
    "exec > /tmp/out 2>&1; echo in the file; cat /tmp/out >&2",
    "exec >&- 2>&-; echo nobody reads",
    "kill -9 $$",
    "kill -INT $$",
    "kill -SEGV $$",
    "sh -c 'kill -9 $$'; echo $?",
    "sh -c 'kill -9 $$'",
    "set -e; false; echo no",
    "set -u; echo $unset",
    "readonly a=1; a=2; echo no",
    ". /nowhere; echo no",
    "return 4; echo no",
    "break; echo yes",
    "echo $LINENO\necho $LINENO\nno-such-program",
    "cat; read line; echo $?",
    "yes | head -n 1; echo a | (read x; echo $x)",
    "sleep 100 & echo started; kill $!; wait $!; echo $?",
    "(exit 3) & wait $!; echo $?",
    "printf '\udcff\\0\u00e9'",
    "",
    " ",
    "#",
    "-c",
    "alias x='echo aliased'\nx",
    "test -t 0; echo $?; test -c /dev/stdin; echo $?",
    "jobs; times > /dev/null; hash; getopts a x; echo $OPTIND",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shell_that_waited_is_like_a_new_one(machine: Clone, command: str) -> None:
    assert waited(machine)
    assert machine.exec(WAITED, env=DIRECTLY).stdout == b"0\n"
    assert seen(machine.exec(command)) == seen(machine.exec(command, env=DIRECTLY))


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("if", 2, b'/bin/sh: 1: Syntax error: end of file unexpected (expecting "then")\n'),
        ("\nno-such-program", 127, b"/bin/sh: 2: no-such-program: not found\n"),
        ("set -u; echo $unset", 2, b"/bin/sh: 1: unset: parameter not set\n"),
    ],
)
def test_what_the_shell_says(machine: Clone, command: str, code: int, said: bytes) -> None:
    assert seen(machine.exec(command)) == (code, b"", said)


def test_input(clone: Clone) -> None:
    big = bytes(range(256)) * 4000
    assert clone.exec("cat", stdin=big, on_output=lambda _: None).output_bytes == len(big)
    assert clone.exec("sha1sum", stdin=big).stdout == clone.exec("head -c 1024000 | sha1sum", stdin=big).stdout
    assert clone.exec("read a; read b; echo $b$a", stdin=b"1\n2\n").stdout == b"21\n"
    assert clone.exec("cat").stdout == b""


def test_variables(clone: Clone) -> None:
    variables = {"A": "1 2\n3", "B": "", "HOME": "/tmp", "E": "\u00e9=\udcff", "LD_LIBRARY_PATH": "/nowhere"}
    for given in ({name: value for name, value in variables.items() if name != "LD_LIBRARY_PATH"}, variables):
        shown = clone.exec("env -0", env=given).stdout.split(b"\0")
        assert {f"{name}={value}".encode(errors="surrogateescape") for name, value in given.items()} <= set(shown)
        assert any(entry.startswith(b"PATH=/usr/local/bin") for entry in shown)
    many = {f"V{number}": str(number) for number in range(2000)}
    assert clone.exec("echo $V0 $V1999", env=many).stdout == b"0 1999\n"
    assert clone.exec("echo $V0 $A $HOME").stdout == b"/home/agent\n"


@pytest.mark.parametrize("name", ["", "A=B"])
def test_names_of_variables_are_checked(clone: Clone, name: str) -> None:
    with pytest.raises(ParameterError, match="name of a variable"):
        clone.exec("true", env={name: "x"})
    assert clone.exec("true").ok


def test_folders(clone: Clone) -> None:
    clone.exec("mkdir -p deep/er")
    assert clone.exec("pwd; echo $PWD", cwd="/workspace/deep/er").stdout == b"/workspace/deep/er\n" * 2
    assert clone.exec("pwd").stdout == b"/workspace\n"
    with pytest.raises(SandboxError, match=r"No such file or directory: /missing"):
        clone.exec("true", cwd="/missing")
    with pytest.raises(SandboxError, match="Not a directory"):
        clone.exec("true", cwd="/etc/passwd")
    clone.exec("rmdir /workspace/deep/er", cwd="/workspace/deep/er")
    assert clone.exec("echo on").stdout == b"on\n"


def test_a_folder_that_only_the_agent_may_enter(machine: Clone) -> None:
    machine.exec("mkdir -m 0 /tmp/closed")
    assert machine.exec("cat /proc/$$/cwd/x; ls", cwd="/tmp/closed").exit_code == 2
    assert machine.exec("echo on").stdout == b"on\n"


@pytest.mark.parametrize("size", [60_000, 70_000, 120_000])
def test_long_commands(clone: Clone, size: int) -> None:
    text = "x" * size
    assert clone.exec(f"a={text}; echo ${{#a}}").stdout == f"{size}\n".encode()
    assert clone.exec("echo on").stdout == b"on\n"


def test_a_command_too_long_to_be_started(clone: Clone) -> None:
    with pytest.raises(SandboxError, match="Argument list too long: /bin/sh"):
        clone.exec(f": {'x' * (1 << 20)}")
    assert clone.exec("echo on").stdout == b"on\n"


@pytest.mark.parametrize("blow", ["KILL -1", "TERM -1", "HUP -1", "STOP -1", "INT -1"])
def test_whatever_happens_to_other_processes_commands_run(clone: Clone, blow: str) -> None:
    for _ in range(3):
        struck = clone.exec(f"trap '' TERM HUP INT; kill -{blow}; echo struck")
        assert (struck.exit_code, struck.stdout) == (0, b"struck\n")
        assert seen(clone.exec("echo $0; exit 5")) == (5, b"/bin/sh\n", b"")


def test_a_command_that_kills_all_shells(clone: Clone) -> None:
    for _ in range(3):
        clone.exec("pkill -9 -x sh")
        assert clone.exec("echo on").stdout == b"on\n"


def test_shells_are_killed_while_commands_start(clone: Clone) -> None:
    clone.exec("while sleep 0.01; do pkill -9 -f -x '/bin/sh -c *'; done > /dev/null 2>&1 &")
    for number in range(30):
        assert seen(clone.exec(f"echo {number} >> ran; echo {number}")) == (0, f"{number}\n".encode(), b"")
    assert clone.get("ran") == "".join(f"{number}\n" for number in range(30)).encode()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300])
def test_timeouts_that_nobody_can_wait_for(clone: Clone, timeout: float) -> None:
    with pytest.raises(ParameterError, match="it must be more than 0 seconds and at most 1000000"):
        clone.exec("true", timeout=timeout)
    assert clone.exec("true").ok


def test_timeouts(clone: Clone) -> None:
    ran = []
    for timeout in (0.5, 0.5, 0.5, 2, 8, 30):  # On a busy machine nothing has begun after the shortest.
        result = clone.exec("echo began; sleep 1000", timeout=timeout)
        assert (result.timed_out, result.exit_code) == (True, -9)
        assert clone.exec("echo on").stdout == b"on\n"
        ran.append(result.stdout)
        if len(ran) >= 3 and b"began\n" in ran:
            break
    assert set(ran) <= {b"", b"began\n"}
    assert b"began\n" in ran


def test_the_shell_that_waits(machine: Clone, microvm_template: MicroVMTemplate) -> None:
    count = "ps -u agent -o args= | grep -c -x '/bin/sh -c *'; true"
    assert machine.exec(count).stdout == b"1\n"
    machine.exec("sleep 1000", timeout=0.3)
    assert waited(machine)
    assert machine.exec(count).stdout == b"1\n"
    for program in (["sleep", "0"], ["env"]):
        assert machine.exec(program).ok
    with microvm_template.clone() as clone:
        assert waited(clone)
        with clone.branch() as branch:
            assert waited(branch)
            assert waited(clone)


def test_a_new_shell_waits_when_one_was_killed(machine: Clone) -> None:
    machine.exec("kill -9 -1")
    machine.exec("true")
    assert waited(machine)


def test_no_command_can_trace_the_shell_that_waits(machine: Clone) -> None:
    found = machine.exec("pgrep -o -u agent -x sh").stdout.decode().strip()
    assert machine.exec(f"cat /proc/{found}/environ").exit_code == 1
    assert machine.exec(f"ls -l /proc/{found}/fd").exit_code != 0
    assert machine.exec("cat /proc/$$/environ > /dev/null").ok


def test_commands_in_the_background(clone: Clone) -> None:
    assert clone.exec("(sleep 0.4; echo late >> log) & echo now").stdout == b"now\n"
    assert clone.exec("setsid sh -c 'until grep late log; do sleep 0.1; done; echo later >> log' > found & :").ok
    assert not clone.exec("until grep later log; do sleep 0.1; done", timeout=60).timed_out
    assert clone.exec("cat log").stdout.split() == [b"late", b"later"]
    assert not clone.exec("while ps -eo stat= | grep -q Z; do sleep 0.1; done", timeout=60).timed_out


def test_a_command_that_reads_its_own_output(clone: Clone) -> None:
    thieves = "for n in 1 2 3; do cat /proc/$$/fd/1 > /dev/null 2>&1 & done; sleep 0.2"
    steal = f"{thieves}; n=0; while [ $n -lt 2000 ]; do echo $n; n=$((n + 1)); done"
    assert clone.exec(steal, timeout=30).ok
    assert clone.exec("echo on").stdout == b"on\n"


def test_each_command_is_a_session_of_its_own(clone: Clone) -> None:
    sessions = [clone.exec("echo $$; ps -o sid=,pgid= -p $$").stdout.split() for _ in range(2)]
    assert all(len(set(numbers)) == 1 for numbers in sessions)
    assert sessions[0] != sessions[1]


def test_nothing_of_a_command_is_in_the_next(clone: Clone) -> None:
    clone.exec("A=1; export B=2; cd /tmp; umask 0; ulimit -n 10; alias x=y; set -x; trap '' TERM; f() { :; }")
    shown = clone.exec("echo $A$B $PWD $(umask) $- $(alias) $(trap); kill $$").stdout
    assert shown == clone.exec("echo /workspace 0022 $-; :").stdout
    assert clone.exec("ulimit -n").stdout != b"10\n"


def test_a_template_can_be_set_up_by_killing_all(microvm_template: MicroVMTemplate) -> None:
    """As this one was, see support/sandbox.py."""
    with microvm_template.clone() as clone:
        assert waited(clone)


def test_processes_have_no_shell_that_waits(process_template: ProcessTemplate) -> None:
    with process_template.clone() as clone:
        assert not waited(clone)
        # One command, as both sides of a pipe are shells for a moment.
        running = clone.exec("ps -eo args=; true").stdout.decode().splitlines()
        assert sum(line.startswith("/bin/sh -c") for line in running) == 1
