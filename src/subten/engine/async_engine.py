"""`AsyncEngine`: many callers of one event loop, one thread that takes the steps.

The two sides share nothing but messages. A caller's wishes (begin, cancel, fork) are functions that the thread calls
between two steps; what a step has added comes back to the event loop in one call per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from subten.engine.intake import Prompt, forked_params
from subten.engine.llm import LLM
from subten.engine.request import Completion, Delta, Request
from subten.engine.sampling import SamplingParams
from subten.engine.tokenizer import Tokenizer
from subten.engine.usage import EngineStats
from subten.errors import EngineStoppedError, ParameterError, SubtenError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Generation:
    """The answers to one prompt while they are being generated: an asynchronous iterator of their deltas.

    `AsyncEngine.submit` makes it. Inside ``async with`` it is cancelled at the end of the block, so that nothing goes
    on being computed for a reader that has gone away.
    """

    def __init__(self, engine: AsyncEngine, answers: Sequence[Request], loop: asyncio.AbstractEventLoop) -> None:
        self.answers = tuple(answers)
        """Belong to the engine's thread until they have finished."""
        self.loop = loop
        self._engine = engine
        self._deltas: deque[Delta] = deque()
        self._unfinished = len(answers)
        self._news = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether all answers have ended; deltas may be left to be read."""
        return self._unfinished == 0

    def cancel(self, answer: int | None = None) -> None:
        """End the answers, or one of them, now; their part of the cache is free after the step that is under way. The
        iterator still gives what was there, and then each answer's last delta, "cancelled". Twice is once.

        Raises:
            ParameterError: there is no such answer.
        """
        self._engine.cancel(self, answer)

    async def fork(
        self, n: int, params: Sequence[SamplingParams] | None = None, *, answer: int = 0
    ) -> list[Generation]:
        """Continue an answer `n` times from where it is, sharing its part of the cache.

        Args:
            n: continuations.
            params: of each, or None for the answer's own with other seeds.
            answer: which of the answers.

        Returns:
            The continuations, on their way. Their prompt is the answer's prompt and what it had of the answer.

        Raises:
            ContextLengthError: the answer has filled the context.
            ParameterError: `n` is not positive, or not the number of `params`; there is no such answer.
        """
        return await self._engine.fork(self, n, params, answer)

    async def completions(self) -> list[Completion]:
        """Wait for the end of all answers; deltas that were not read are dropped."""
        async for _ in self:
            pass
        return [request.completion() for request in self.answers]

    def receive(self, deltas: Iterable[Delta]) -> None:
        """Take what a step has added; called in the event loop."""
        for delta in deltas:
            self._deltas.append(delta)
            self._unfinished -= delta.finish_reason is not None
        self._news.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.finished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncEngine:
    """Serves an `LLM` to the tasks of one or several event loops. The `LLM` belongs to it from then on.

    Args:
        llm: the model with its cache, on any device.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._wishes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: list[Generation] = []
        self._failure: str | None = None
        self._closing = False
        self._lock = threading.Lock()  # between asking whether the engine takes wishes, and leaving one
        # A tokenizer is no place for two threads at a time, and a long prompt would hold up the event loop.
        self._tokenizing = ThreadPoolExecutor(1, "subten-tokenizer")
        self._thread = threading.Thread(target=self._run, name="subten-engine", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether an error has ended all requests; no new ones are taken then."""
        return self._failure is not None

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Begin to answer a prompt.

        Raises:
            ContextLengthError: the prompt is as long as the context or longer.
            ParameterError: an empty prompt, or a token id outside the vocabulary.
            EngineStoppedError: the engine is closed or has failed.
        """
        with self._lock:
            self._check_open()
        loop = asyncio.get_running_loop()
        make = self._llm.intake.requests
        answers = await loop.run_in_executor(self._tokenizing, make, prompt, params or SamplingParams())
        generation = Generation(self, answers, loop)
        self._wish(lambda: self._begin(generation))
        return generation

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Delta, None]:
        """Answer a prompt piece by piece. Closing the generator, or cancelling the task that reads it, cancels the
        request and frees its part of the cache.

        Raises:
            SubtenError: as `submit`, at the first piece.
        """
        async with await self.submit(prompt, params) as generation:
            async for delta in generation:
                yield delta

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Completion]:
        """Answer a prompt: `n` completions. Cancelling the task that waits cancels the request.

        Raises:
            SubtenError: as `submit`.
        """
        async with await self.submit(prompt, params) as generation:
            return await generation.completions()

    async def with_tokenizer(self, work: Callable[[Tokenizer], T]) -> T:
        """What a function makes of the model's tokenizer, in the thread in which prompts are tokenised.

        Raises:
            EngineStoppedError: the engine is closed or has failed.
        """
        with self._lock:
            self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, work, self._llm.tokenizer)

    async def stats(self) -> EngineStats:
        """How busy the engine is.

        Raises:
            EngineStoppedError: the engine is closed or has failed.
        """
        return await asyncio.wrap_future(self._ask(self._llm.stats))

    async def close(self, *, drain: bool = False) -> None:
        """End the thread: after the requests that are under way (`drain`), or at once, which cancels them. Nothing
        new is taken. Twice is once."""
        with self._lock:
            self._closing = True
        self._wishes.put(_nothing if drain else self._cancel_all)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._tokenizing.shutdown)  # A long prompt may be on its way.

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def cancel(self, generation: Generation, answer: int | None = None) -> None:
        """See `Generation.cancel`."""
        if answer is not None:
            _checked(answer, generation)
        if not generation.finished:
            self._wishes.put(lambda: self._cancel(generation, answer))

    async def fork(
        self, generation: Generation, n: int, params: Sequence[SamplingParams] | None, answer: int
    ) -> list[Generation]:
        """See `Generation.fork`."""
        if params is not None and len(params) != n:
            raise ParameterError(f"there are {len(params)} params for {n} continuations; give none, or one each")
        parent = generation.answers[_checked(answer, generation)]
        loop = asyncio.get_running_loop()

        def begin() -> list[Generation]:
            children = self._llm.intake.branches(parent, params or forked_params(parent, n))
            self._llm.loop.fork(parent, children)
            forks = [Generation(self, [child], loop) for child in children]
            self._live += forks
            return forks

        forks = self._ask(begin)
        try:
            return await asyncio.wrap_future(forks)
        except asyncio.CancelledError:
            forks.add_done_callback(_cancel_forks)  # They may have begun; nobody will read them.
            raise

    def _ask(self, question: Callable[[], T]) -> Future[T]:
        """What a function returns or raises that the engine's thread calls between two steps."""
        answer: Future[T] = Future()

        def ask() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except SubtenError as error:
                    answer.set_exception(error)
                except Exception as error:  # A bug, of which nobody knows what it has left behind.
                    self._fail(error)
                    answer.set_exception(error)

        self._wish(ask)
        return answer

    def _wish(self, wish: Callable[[], None]) -> None:
        with self._lock:
            self._check_open()
            self._wishes.put(wish)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(self._failure)
        if self._closing:
            raise EngineStoppedError("the engine is closed; make a new one")

    # --- in the engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._closing and self._wishes.empty() and not self._live):
            try:
                self._grant_wishes()
                if self._llm.loop.busy:
                    self._llm.loop.step()
            except Exception as error:
                self._fail(error)
            self._deliver()

    def _grant_wishes(self) -> None:
        """Those that are there; where there is nothing else to do, wait for one."""
        if not self._llm.loop.busy:
            self._wishes.get()()
        while not self._wishes.empty():
            self._wishes.get()()

    def _begin(self, generation: Generation) -> None:
        self._live.append(generation)
        if self._failure is None:
            self._llm.loop.add(generation.answers[0])
        else:  # It failed behind the submission.
            self._give_up(generation, self._failure)

    def _cancel(self, generation: Generation, answer: int | None = None) -> None:
        chosen = generation.answers if answer is None else generation.answers[answer : answer + 1]
        for request in reversed(chosen):
            self._llm.loop.cancel(request)

    def _cancel_all(self) -> None:
        for generation in self._live:
            self._cancel(generation)

    def _fail(self, error: Exception) -> None:
        """After an error that is no request's own: end all of them, and take no more."""
        with self._lock:
            self._failure = f"the engine has failed and takes no more requests: {error}"
        log.error("%s", self._failure, exc_info=error)
        for generation in self._live:
            self._give_up(generation, self._failure)
        self._cancel_all()

    def _give_up(self, generation: Generation, failure: str) -> None:
        for request in generation.answers:
            if request.finish_reason is None:
                request.fail(EngineStoppedError(failure))

    def _deliver(self) -> None:
        """Send what is new to the event loops, in one call each, and forget what has ended."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[Generation, list[Delta]]]] = {}
        for generation in self._live:
            deltas = [delta for request in generation.answers for delta in request.deltas]
            if deltas:
                news.setdefault(generation.loop, []).append((generation, deltas))
            for request in generation.answers:
                request.deltas = []
        for loop, pieces in news.items():
            try:
                loop.call_soon_threadsafe(_receive, pieces)
            except RuntimeError:  # The event loop has been closed: nobody reads any more.
                for generation, _ in pieces:
                    self._cancel(generation)
        self._live = [g for g in self._live if any(request.finish_reason is None for request in g.answers)]


def _receive(pieces: Sequence[tuple[Generation, list[Delta]]]) -> None:
    for generation, deltas in pieces:
        generation.receive(deltas)


def _checked(answer: int, generation: Generation) -> int:
    if not 0 <= answer < len(generation.answers):
        raise ParameterError(f"there is no answer {answer}; they are numbered 0 to {len(generation.answers) - 1}")
    return answer


def _cancel_forks(forks: Future[list[Generation]]) -> None:
    if not forks.cancelled() and forks.exception() is None:
        for generation in forks.result():
            generation.cancel()


def _nothing() -> None:
    """Wakes the engine's thread."""
