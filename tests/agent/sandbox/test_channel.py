"""The host's end of the stream, against guests that answer wrongly or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from subten.agent.sandbox.channel import Channel, LostError
from subten.agent.sandbox.guest.agent import HEADER

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def frame(kind: bytes, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def ask(channel: Channel, soft: float | None = None, grace: float = 60) -> dict[str, object]:
    return channel.request({"do": "ping"}, (), None, soft, grace)


def until_told_to_end(guest: socket.socket, answer: bytes) -> None:
    """A guest that answers, from a thread of its own, as soon as it is told to end what runs."""

    def obey(receive: Callable[[int], bytes]) -> None:
        while receive(1) != b"k":
            pass
        guest.sendall(answer)

    threading.Thread(target=obey, args=(guest.recv,), daemon=True).start()


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"r", b"no json"),
        frame(b"r", b"[1]"),
        frame(b"r", b"[" * 100_000),
        frame(b"1", b"output that nobody asked for"),
        HEADER.pack(b"r", 1 << 31),
    ],
)
def test_broken_protocol(ends: Ends, sent: bytes) -> None:
    channel, guest = ends
    guest.sendall(sent)
    with pytest.raises(LostError, match="broke the protocol"):
        ask(channel)


def test_silence(ends: Ends) -> None:
    channel, guest = ends
    with pytest.raises(LostError, match=r"did not answer within 0\.2 s"):
        ask(channel, grace=0.2)
    with pytest.raises(LostError, match=r"did not answer within 0\.1 s"):
        channel.wait_ready(0.1)
    guest.close()
    with pytest.raises(LostError, match="is gone"):
        ask(channel)


def test_half_a_frame_is_kept_until_the_rest_comes(ends: Ends) -> None:
    channel, guest = ends
    answer = frame(b"r", json.dumps({"x": 1}).encode())
    guest.sendall(answer[:7])
    until_told_to_end(guest, answer[7:])
    assert ask(channel, soft=0.05) == {"x": 1}


def test_after_its_time_the_guest_is_told_to_end_it(ends: Ends) -> None:
    channel, guest = ends
    until_told_to_end(guest, frame(b"r", b"{}"))
    assert ask(channel, soft=0.1) == {}


def test_a_guest_that_does_not_read(ends: Ends) -> None:
    channel, _ = ends
    with pytest.raises(LostError, match="did not read"):
        channel.request({"do": "put"}, [(b"d", bytes(1 << 16))] * 100, None, None, 0.2)
