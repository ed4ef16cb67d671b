"""The MCP server, spoken to by the SDK's own client, in memory and as the command that agents start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import CallToolResult, TextContent

from subten.agent.mcp_server import MAX_COMMAND_BYTES, Tools, build_server
from subten.agent.policy import load_policy
from subten.agent.sandbox import Pool, ProcessTemplate, Template, process
from subten.cli import main
from subten.errors import ParameterError, SandboxError

POLICY = """\
rules:
  - deny: rm *
    reason: nothing is removed here
  - ask: git push *
"""
HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
CALLS = 3


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def pool(template: Template) -> Iterator[Pool]:
    with Pool(template, CALLS) as pool:
        yield pool


Talk = Callable[[Client], Awaitable[None]]


@pytest.fixture
def talk(pool: Pool, policy: Path, workspace: Path) -> Callable[[Talk], None]:
    """Run a conversation with a server in this process."""
    server = build_server(Tools(load_policy(policy), pool, workspace), CALLS)

    async def converse(conversation: Talk) -> None:
        async with Client(server) as client:
            await conversation(client)

    return lambda conversation: anyio.run(converse, conversation)


async def run(client: Client, command: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool("run_in_sandbox", {"command": command, **arguments})
    assert not answer.is_error, answer
    assert answer.structured_content is not None
    return answer.structured_content


def complaint(answer: CallToolResult) -> str:
    assert answer.is_error
    assert isinstance(answer.content[0], TextContent)
    return answer.content[0].text


def test_what_the_tools_answer(talk: Callable[[Talk], None], template: Template) -> None:
    async def conversation(client: Client) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"validate_command", "run_in_sandbox"}
        verdict = await client.call_tool("validate_command", {"command": "ls && rm notes.txt"})
        assert verdict.structured_content == {
            "decision": "deny",
            "rule": "deny: rm *",
            "span": [6, 18],
            "reason": "nothing is removed here",
        }
        done = await run(
            client,
            "cat notes.txt given/in; echo more >> notes.txt; ln -s / out; echo oh >&2; exit 3",
            files={"given/in": "hällo\n"},
        )
        assert (done["exit_code"], done["timed_out"], done["truncated"]) == (3, False, False)
        assert done["stdout"] == "one\ntwo\nthree\nhällo\n"
        assert done["stderr"] == "oh\n"
        assert done["tier"] == template.tier
        assert "+more\n" in done["changes"]
        assert "+++ b/given/in\n" in done["changes"]
        assert "may lead out" in done["not_exported"]["out"]
        assert not done["changes_truncated"]
        again = await run(client, "cat notes.txt")
        assert (again["stdout"], again["changes"]) == ("one\ntwo\nthree\n", "")

    talk(conversation)


def test_what_the_policy_does_not_allow_is_not_run(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        for command, reason in (
            ("rm notes.txt", "the policy says deny: nothing is removed here (rule deny: rm *"),
            ("git push origin", "the policy says ask"),
            ('eval "$X"', "the policy says ask: eval runs shell text that is not known (rule opaque"),
            ("echo '", "the policy says ask"),
            ("echo a\0b", "the policy says ask: it holds NUL bytes"),
        ):
            assert reason in complaint(await client.call_tool("run_in_sandbox", {"command": command}))

    talk(conversation)


def test_the_policy_holds_for_the_real_folder_too(pool: Pool, workspace: Path, tmp_path: Path) -> None:
    path = tmp_path / "protect.yaml"
    path.write_text(f"protect_paths: [{workspace}/src]\n")
    tools = Tools(load_policy(path), pool, workspace)
    with pytest.raises(SandboxError, match="the policy says deny"):
        tools.check("rm -r src", 1, {})
    tools.check("rm notes.txt", 1, {})
    assert tools.validate("rm -r src", None).decision == "deny"
    assert tools.validate("rm -r src", "/tmp").decision == "allow"


def test_bad_input(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        long = "echo " + "x" * (1 << 20)
        verdict = await client.call_tool("validate_command", {"command": long})
        assert verdict.structured_content is not None
        assert verdict.structured_content["decision"] == "ask"
        for arguments, reason in (
            ({"command": long}, f"has 1048581 bytes; at most {MAX_COMMAND_BYTES} can be run"),
            ({"command": "true", "timeout": 0}, "timeout is 0; it must be more than 0 s"),
            ({"command": "true", "timeout": 1e9}, "at most 600 s"),
            ({"command": "true", "files": {"../x": ""}}, "must lead to below /workspace"),
            ({"command": "true", "files": {"/etc/x": ""}}, "must lead to below /workspace"),
            ({"command": "true", "files": {"": ""}}, "must lead to below /workspace"),
            ({"command": "true", "files": {"a\0": ""}}, "must lead to below /workspace"),
            ({"command": "true", "files": {"x": "x" * (9 << 20)}}, "1 files of 9437184 bytes"),
            ({"command": "true", "files": {"notes.txt/x": ""}}, "File exists: /workspace/notes.txt"),
            ({"command": ["ls"]}, "should be a valid string"),
            ({}, "Field required"),
        ):
            said = complaint(await client.call_tool("run_in_sandbox", arguments))
            assert reason in said
            assert "Traceback" not in said
        said = complaint(await client.call_tool("validate_command", {"command": "ls", "cwd": "here"}))
        assert "cwd is 'here'; it must be an absolute path" in said
        assert (await run(client, "echo still here"))["stdout"] == "still here\n"

    talk(conversation)


def test_bytes_that_are_no_text_come_back_as_such(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        done = await run(client, r"printf '\377\n'; echo x > $(printf 'name\377')")
        assert done["stdout"] == "\ufffd\n"
        assert 'b/name\\377"' in done["changes"]

    talk(conversation)


def test_output_and_diff_are_limited(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        done = await run(client, "seq 60000 > numbers; seq 60000")
        assert done["truncated"]
        assert done["changes_truncated"]
        assert len(done["changes"]) <= 1 << 18

    talk(conversation)


def test_calls_run_side_by_side_and_apart(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        finished: list[str] = []
        hosts: set[str] = set()

        async def hang() -> None:
            await run(client, "sleep 1000", timeout=600)
            finished.append("hanging")

        async def quick() -> None:
            done = await run(client, "uname -n; ls; echo x > mine")
            assert "mine" not in done["stdout"].split()
            hosts.add(done["stdout"].split()[0])
            finished.append("quick")

        async with anyio.create_task_group() as calls:
            calls.start_soon(hang)
            await anyio.sleep(0.5)
            async with anyio.create_task_group() as others:
                for _ in range(CALLS):
                    others.start_soon(quick)
                verdict = await client.call_tool("validate_command", {"command": "ls"})
                assert verdict.structured_content is not None
            assert finished == ["quick"] * CALLS
            calls.cancel_scope.cancel()
        assert len(hosts) == CALLS

    talk(conversation)


def test_a_call_whose_time_is_over(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        for timeout in (1, 4, 16):  # On a busy machine nothing has begun after the shortest.
            done = await run(client, "echo begun; sleep 1000", timeout=timeout)
            assert done["timed_out"]
            if done["stdout"]:
                break
        assert done["stdout"] == "begun\n"

    talk(conversation)


def test_a_call_that_is_given_up_leaves_room(talk: Callable[[Talk], None]) -> None:
    async def conversation(client: Client) -> None:
        async with anyio.create_task_group() as calls:
            for _ in range(CALLS):
                calls.start_soon(partial(run, client, "sleep 1000", timeout=600))
            await anyio.sleep(1)
            calls.cancel_scope.cancel()
        with anyio.fail_after(120):
            assert (await run(client, "echo next"))["stdout"] == "next\n"

    talk(conversation)


def test_no_clones(process_template: ProcessTemplate, policy: Path) -> None:
    with Pool(process_template, 1) as pool:
        tools = Tools(load_policy(policy), pool, None)
    with pytest.raises(SandboxError, match="the pool was closed"):
        tools.run("true", 1, {}, lambda _: None)


def test_a_time_that_is_none(process_template: ProcessTemplate, policy: Path) -> None:
    with Pool(process_template, 1) as pool, pytest.raises(ParameterError, match="timeout is nan"):
        Tools(load_policy(policy), pool, None).check("true", float("nan"), {})


# As a command

COMMAND = [sys.executable, "-m", "subten", "agent", "mcp"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """What the command says when it does not start."""

    def start(*arguments: str) -> str:
        assert main(["agent", "mcp", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err.strip()

    return start


def test_over_stdio(process_template: ProcessTemplate, policy: Path, workspace: Path) -> None:
    arguments = ["--policy", str(policy), "--workspace", str(workspace), "--tier", "process"]
    server = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *arguments], env=environment())

    async def conversation() -> None:
        async with Client(stdio_client(server)) as client:
            assert (await run(client, "cat notes.txt"))["tier"] == process_template.tier
            verdict = await client.call_tool("validate_command", {"command": "rm x"})
            assert verdict.structured_content is not None
            assert verdict.structured_content["decision"] == "deny"

    anyio.run(conversation)


def test_only_the_protocol_is_on_stdout(process_template: ProcessTemplate) -> None:
    server = subprocess.Popen(
        [*COMMAND, "--tier", "process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stderr is not None

    def send(method: str, number: int | None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        line = json.dumps(message if number is None else {**message, "id": number})
        assert server.stdin is not None
        server.stdin.write(line.encode() + b"\n")
        server.stdin.flush()

    def call(number: int, command: str) -> None:
        send("tools/call", number, name="run_in_sandbox", arguments={"command": command, "timeout": 500})

    try:
        send("initialize", 1, **HELLO)
        send("notifications/initialized", None)
        server.stdin.write(b"\xff\xfe no protocol\n{}\n[1]\n" + b"[" * 100_000 + b"\n\n")
        call(2, "echo here")
        answers: dict[int, dict[str, Any]] = {}
        while 2 not in answers:
            message = json.loads(server.stdout.readline())
            answers[message.get("id")] = message
        assert answers[2]["result"]["structuredContent"]["stdout"] == "here\n"
        # The client goes away while a command hangs.
        call(3, "sleep 1000")
        time.sleep(1)
        server.stdin.close()
        assert server.wait(60) == 0
        for line in server.stdout.read().splitlines():
            json.loads(line)
        assert b"Traceback" not in server.stderr.read()
    finally:
        server.kill()
        server.wait()
        for stream in (server.stdin, server.stdout, server.stderr):
            stream.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_and_leave_nothing(
    process_template: ProcessTemplate, tmp_path: Path, number: int, status: int
) -> None:
    server = subprocess.Popen(
        [*COMMAND, "--tier", "process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    assert server.stdin is not None
    assert server.stderr is not None
    try:
        assert b"MCP server on standard input and output" in server.stderr.readline()
        assert list(tmp_path.iterdir())
        server.send_signal(number)
        assert server.wait(60) == status
        assert server.stderr.read() == b""
        assert list(tmp_path.iterdir()) == []
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stderr.close()


def test_over_http(process_template: ProcessTemplate, refused: Refused) -> None:
    server = subprocess.Popen(
        [*COMMAND, "--tier", "process", "--http", "0"], stderr=subprocess.PIPE, env=environment()
    )
    assert server.stderr is not None
    try:
        url = server.stderr.readline().decode().split()[3].rstrip(";")

        async def conversation() -> None:
            async with Client(url) as client:
                assert (await run(client, "echo over http"))["stdout"] == "over http\n"

        anyio.run(conversation)
        port = url.split(":")[2].split("/")[0]
        assert refused("--http", port) == f"error: port {port} can't be listened on: Address already in use"
    finally:
        server.terminate()
        server.wait(60)
        server.stderr.close()


def test_it_does_not_start_with_a_policy_that_contradicts_itself(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("rules:\n  - allow: ls *\n  - deny: rm *\n    match: [ls]\n")
    assert refused("--policy", str(path)).startswith(f"error: {path}:3: ")
    missing = tmp_path / "none"
    assert refused("--policy", str(missing)) == f"error: {missing} can't be read: No such file or directory"


def test_it_does_not_start_without_a_sandbox(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(process, "unavailable", process.unavailable.__wrapped__)
    said = refused()
    assert said.startswith("error: no sandbox works on this machine: microVMs need the program qemu-system-x86_64; ")
    assert "; process sandboxes need the program bwrap; install the package bubblewrap" in said


def test_options_are_checked(process_template: ProcessTemplate, tmp_path: Path, refused: Refused) -> None:
    assert refused("--tier", "vm") == "error: --tier is 'vm'; it must be microvm or process"
    missing = tmp_path / "none"
    assert refused("--workspace", str(missing)) == f"error: --workspace is '{missing}'; it must be a folder"
    for clones in ("0", "65"):
        said = refused("--tier", "process", "--clones", clones)
        assert said == f"error: --clones is {clones}; it must be 1 to 64, as each takes the memory of a sandbox"
    assert refused("--http", "70000") == "error: --http is 70000; a port is at most 65535"
