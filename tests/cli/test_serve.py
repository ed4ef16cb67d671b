"""`subten serve`: what is wrong with its options is one line. Serving itself is tested in tests/server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "the setting port is 70000"),
        (["--api-key-file", "nowhere"], "nowhere can't be read"),
        (["--max-queue", "-1"], "the setting max_queue is -1"),
        (["--kv", "nonsense"], "nonsense"),
        (["--host", ""], "the setting host is ''"),
        (["--host", "no-such-host.invalid"], "the host is 'no-such-host.invalid', which has no address"),
        (["--host", "192.0.2.1"], "nothing can listen at port 0 of 192.0.2.1"),
        (["--served-model-name", ""], "the setting served_model_name is ''"),
        (["--allowed-origin", "http://localhost:3000/"], "it must be * or an origin without a path"),
        (["--allowed-origin", "localhost"], "it must be * or an origin without a path"),
        (["--max-batch", "-1"], "max_batch is -1"),
    ],
)
def test_bad_options_are_one_line(subten: Callable[..., Any], model: str, options: list[str], words: str) -> None:
    result = subten("serve", model, "--max-context", "100", "--port", "0", *options)
    assert result.exit_code == 2
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert words in line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "http", "the setting port is 'http' in SUBTEN_SERVE_PORT: "),
        ("ALLOWED_ORIGINS", "http://localhost:3000", "a list is JSON there"),
    ],
)
def test_a_variable_that_makes_no_sense_is_one_line(
    subten: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"SUBTEN_SERVE_{name}", value)
    result = subten("serve", model)
    assert result.exit_code == 2
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(subten: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = subten("serve", "no-such-model", "--port", str(port))
    assert result.exit_code == 2
    assert result.err.startswith(f"error: nothing can listen at port {port} of 127.0.0.1: Address already in use; ")
    assert result.err.count("\n") == 1


def test_keys_that_can_not_be_read_are_said_before_the_model_is_loaded(subten: Callable[..., Any]) -> None:
    result = subten("serve", "no-such-model", "--port", "0", "--api-key-file", "nowhere")
    assert result.err == "error: the key file nowhere can't be read: No such file or directory\n"


def test_keys_are_read_once(subten: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from `--api-key-file <(pass show keys)`, where there is nothing left to be read a second time."""
    from fastapi.testclient import TestClient

    from subten.server import process

    asked = []

    class Server:
        def __init__(self, config: Any, *_more: Any) -> None:
            self._app = config.app

        def run(self, _sockets: Any) -> None:
            with TestClient(self._app) as client:
                for key in ("secret", "other"):
                    answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                    asked.append(answer.status_code)

    monkeypatch.setattr(process, "_Server", Server)
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    try:
        result = subten(
            *("serve", model, "--max-context", "100", "--port", "0"), *("--api-key-file", f"/dev/fd/{reader}")
        )
    finally:
        os.close(reader)
    assert result.exit_code == 0, result.err
    assert asked == [200, 401]


def test_a_port_that_is_taken_meanwhile_is_an_error(model: str) -> None:
    from subten.engine import LLM
    from subten.errors import ParameterError
    from subten.server.process import listen, run
    from subten.server.settings import ServerSettings

    settings = ServerSettings(port=0)
    with listen(settings) as sockets, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(sockets[0].getsockname())
        other.listen()
        with pytest.raises(ParameterError, match="nothing can listen"):
            run(LLM(model, kv="kv2-plain", max_context=100), settings, sockets, [])


def test_all_addresses_of_a_name_have_one_port() -> None:
    from subten.server.process import listen
    from subten.server.settings import ServerSettings

    with listen(ServerSettings(host="localhost", port=0)) as sockets:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
