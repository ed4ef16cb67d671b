"""What a clone does for those who mean well."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest

from subten.agent.sandbox import Clone, Limits, MicroVMTemplate, Output, Pool, Result, Template
from subten.errors import ParameterError, SandboxError


def test_exec(clone: Clone) -> None:
    result = clone.exec("cat; echo oh >&2; pwd; exit 3", stdin=b"from the host\n")
    assert (result.exit_code, result.ok, result.timed_out, result.truncated) == (3, False, False, False)
    assert result.stdout == b"from the host\n/workspace\n"
    assert result.stderr == b"oh\n"
    assert result.tier == clone.tier
    assert clone.exec(["printf", "%s|", "a b", "$HOME", "'"]).stdout == b"a b|$HOME|'|"
    assert clone.exec("echo $X; pwd", env={"X": "y"}, cwd="/tmp").stdout == b"y\n/tmp\n"
    assert clone.exec("kill -TERM $$").exit_code == -15
    assert clone.exec("no-such-program").exit_code == 127


def test_tiers_say_what_they_are(template: Template) -> None:
    assert template.tier in ("process: not a VM", "microvm (TCG)", "microvm (KVM)")
    assert template.tier.startswith("microvm") is isinstance(template, MicroVMTemplate)


def test_nothing_of_the_hosts_environment_gets_in(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    names = {line.split("=")[0] for line in clone.exec("env").stdout.decode().splitlines()}
    assert names <= {"PATH", "HOME", "USER", "LANG", "TERM", "PWD", "OLDPWD", "SHLVL", "_"}
    assert clone.exec("id -u").stdout == b"1000\n"


def test_output_comes_while_the_command_runs(clone: Clone) -> None:
    came: list[Output] = []

    def leave(part: Output) -> None:
        came.append(part)
        clone.kill()

    assert clone.exec("sleep 1").seconds > 0.9
    with pytest.raises(SandboxError, match="was ended while it was at work"):
        clone.exec("echo first; sleep 1000; echo last", on_output=leave)
    assert came == [Output("stdout", b"first\n")]


def test_timeout_ends_all_and_the_clone_lives_on(clone: Clone) -> None:
    result = clone.exec("setsid sleep 1000 & sleep 1000", timeout=0.5)
    assert result.timed_out
    assert not result.ok
    assert clone.exec("ps -eo args").stdout.count(b"sleep 1000") == 0


def test_background_processes_go_on(clone: Clone) -> None:
    assert clone.exec("(sleep 0.5; echo done > later) > /dev/null 2>&1 &").ok
    assert clone.exec("until test -s later; do sleep 0.1; done; cat later", timeout=30).stdout == b"done\n"


def test_files(clone: Clone) -> None:
    clone.put({"new/deep/file": b"\0\xff" * 100_000, "notes.txt": b"replaced"})
    assert clone.get("new/deep/file") == b"\0\xff" * 100_000
    assert clone.exec("cat notes.txt; stat -c %U new").stdout == b"replacedagent\n"
    clone.put({"a": b"x"}, folder="/tmp/elsewhere")
    assert clone.get("/tmp/elsewhere/a") == b"x"


def test_files_that_cannot_be_moved(clone: Clone) -> None:
    with pytest.raises(SandboxError, match="No such file"):
        clone.get("missing")
    clone.exec("mkfifo pipe")
    with pytest.raises(SandboxError, match="not a regular file"):
        clone.get("pipe")
    with pytest.raises(SandboxError, match="larger than 3 bytes"):
        clone.get("notes.txt", max_bytes=3)
    with pytest.raises(SandboxError, match="No such file"):
        clone.put({"x": b""}, folder="/proc/1/x")
    with pytest.raises(SandboxError, match="No such file"):
        clone.exec("true", cwd="/missing")
    assert clone.exec("echo still here").ok


def test_the_workspace_is_a_copy(clone: Clone, template: Template, workspace: Path) -> None:
    assert clone.exec("./run.sh && readlink link && cat .git/config").stdout == b"ran\nsrc/main.py\n[core]\n"
    clone.exec("rm -rf src; echo changed > notes.txt")
    assert (workspace / "notes.txt").read_text() == "one\ntwo\nthree\n"
    with template.clone() as sibling:
        assert sibling.exec("cat notes.txt src/main.py").stdout == b"one\ntwo\nthree\nprint('hello')\n"


def test_the_system_can_be_written_and_nothing_stays(clone: Clone, template: Template) -> None:
    assert clone.exec("mkdir /srv /opt; echo x > /opt/x && cat /opt/x").stdout == b"x\n"
    with template.clone() as sibling:
        assert sibling.exec("cat /opt/x").exit_code == 1


def test_branch(clone: Clone) -> None:
    clone.exec("echo mine > mine; rm notes.txt; rm -rf src; echo file > src; ln -s mine also")
    with clone.branch() as branch:
        assert branch.name != clone.name
        assert branch.exec("cat mine also src; ls notes.txt").stdout == b"mine\nmine\nfile\n"
        branch.exec("echo branch > mine")
        clone.exec("echo origin > mine")
        assert (branch.get("mine"), clone.get("mine")) == (b"branch\n", b"origin\n")
        assert {change.path for change in branch.changes().changed} >= {"mine", "also", "notes.txt", "src"}


def test_branch_of_a_machine_takes_its_processes_along(microvm_template: MicroVMTemplate) -> None:
    with microvm_template.clone() as clone:
        clone.exec(
            "echo 0 > /tmp/n; "
            "while sleep 0.1; do echo $(($(cat /tmp/n) + 1)) > /tmp/m; mv /tmp/m /tmp/n; done > /dev/null 2>&1 &"
        )
        with clone.branch() as branch, branch.branch() as second:
            clone.kill()
            for machine in (branch, second):
                before = int(machine.get("/tmp/n"))
                grown = f"until test $(cat /tmp/n) -gt {before}; do sleep 0.1; done 2> /dev/null"
                assert machine.exec(grown, timeout=30).ok


def test_setup(microvm_template: MicroVMTemplate) -> None:
    assert microvm_template.boot_seconds > 0
    with microvm_template.clone() as clone:
        assert clone.get("/tmp/setup") == b"ready\n"
    with pytest.raises(SandboxError, match="the setup command 'echo no; false' failed with 1: no"):
        MicroVMTemplate(image=microvm_template.image, setup=["echo no; false"])


def test_kill_from_another_thread(clone: Clone) -> None:
    def kill(_: Output) -> None:
        threading.Thread(target=clone.kill).start()

    with pytest.raises(SandboxError, match="was ended while it was at work"):
        clone.exec("echo begun; sleep 1000", on_output=kill)
    assert not clone.alive
    with pytest.raises(SandboxError, match="take a new one"):
        clone.exec("true")
    clone.kill()


def test_a_callback_that_fails_ends_the_clone(clone: Clone) -> None:
    def fail(_: Output) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        clone.exec("echo x; sleep 1000", on_output=fail)
    assert not clone.alive


def test_pool(template: Template) -> None:
    with Pool(template, 2) as pool:
        clones = [pool.take() for _ in range(3)]
        assert len({clone.name for clone in clones}) == 3
        assert all(clone.exec("echo here").stdout == b"here\n" for clone in clones)
        for clone in clones:
            clone.kill()
    with pytest.raises(SandboxError, match="pool was closed"):
        pool.take()


@pytest.mark.parametrize("size", [0, 65])
def test_a_pool_has_a_size(size: int) -> None:
    # Before the template is asked for anything.
    with pytest.raises(ParameterError, match=f"the size of a pool is {size}; it must be 1 to 64"):
        Pool(cast("Template", None), size)


def test_a_pools_clone_has_run_a_command(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, object]] = []
    run = Clone.exec

    def record(clone: Clone, command: str) -> Result:
        ran.append((clone.name, command))
        return run(clone, command)

    monkeypatch.setattr(Clone, "exec", record)
    with Pool(template, 1) as pool:
        pool.wait()
        with pool.take() as clone:
            assert ran[0] == (clone.name, "true")


def test_a_clone_that_can_not_run_a_command_is_not_kept(
    process_template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Clone] = []

    def fail(clone: Clone, command: str) -> Result:
        started.append(clone)
        raise SandboxError("it is broken")

    monkeypatch.setattr(Clone, "exec", fail)
    with Pool(process_template, 1) as pool, pytest.raises(SandboxError, match="it is broken"):
        pool.take()
    assert started
    assert not any(clone.alive for clone in started)


def test_pool_says_why_there_are_no_clones(process_template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Clone:
        raise SandboxError("no more")

    monkeypatch.setattr(process_template, "clone", fail)
    with Pool(process_template, 1) as pool, pytest.raises(SandboxError, match="no more"):
        pool.take()


@pytest.mark.parametrize("field", ["memory_mib", "disk_mib", "processes", "output_bytes"])
def test_limits_are_checked(field: str) -> None:
    with pytest.raises(ParameterError, match=f"{field} is -1"):
        Limits(**{field: -1})


def test_parameters_are_checked(clone: Clone) -> None:
    with pytest.raises(ParameterError, match="more than 0"):
        clone.exec("true", timeout=0)
    with pytest.raises(ParameterError, match="NUL"):
        clone.exec("echo \0")
    assert clone.exec("true").ok
