"""Calls that block, beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What a function returns or raises that is called in a thread of its own.

    Cancelling the future does not end the thread. The thread, which may wait for a person, keeps no process alive.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=run, name="subten-branch", daemon=True).start()
    return asyncio.wrap_future(answer)
